"""Parts of the transfer: keys, messages, the shaped link, credits and bounded memory."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffkv_repro.kvserve import shaper
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.keys import KeyFileError, load_keys, make_keys
from diffkv_repro.kvserve.link import Incoming, LinkError, LinkSettings, Outgoing
from diffkv_repro.kvserve.messages import MessageError, pack, unpack
from diffkv_repro.kvserve.shaper import Shaper, shaped_by_tc


def test_keys_are_for_their_owner_alone(tmp_path):
    made = make_keys(tmp_path / "keys")
    modes = {path.name: path.stat().st_mode & 0o777 for path in made}
    assert modes["server.key_secret"] == modes["client.key_secret"] == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    server, client = (load_keys(tmp_path / "keys", role) for role in ("server", "client"))
    assert client.server == server.own.public != client.own.public
    assert server.own.secret.decode() not in repr(server)
    with pytest.raises(KeyFileError, match="has keys already"):
        make_keys(tmp_path / "keys")
    assert load_keys(tmp_path / "keys", "server") == server
    make_keys(tmp_path / "keys", replace=True)
    assert load_keys(tmp_path / "keys", "server") != server


def test_keys_that_others_can_read_or_that_are_none_are_refused(tmp_path):
    make_keys(tmp_path)
    secret = tmp_path / "client.key_secret"
    secret.chmod(0o640)
    with pytest.raises(KeyFileError, match="permissions 0640"):
        load_keys(tmp_path, "client")
    secret.chmod(0o600)
    secret.write_text("nothing")
    with pytest.raises(KeyFileError, match="client"):
        load_keys(tmp_path, "client")
    with pytest.raises(KeyFileError, match="serve keys"):
        load_keys(tmp_path / "absent", "server")
    with pytest.raises(KeyFileError, match="role is 'spy'"):
        load_keys(tmp_path, "spy")


def test_a_message_comes_back():
    fields = {"slo": float("inf"), "min_quality": 0.97, "recompute": 2.5, "window": 7, "overlap": True}
    more = {"tokens": 3, "model": "ab", "workload": "*", "options": {"profile": "int4"}}
    found = unpack(pack("ask", "r1", b"abc", **fields, **more))
    assert (found.kind, found.request, bytes(found.body)) == ("ask", "r1", b"abc")
    assert dict(found.fields) == fields | more


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_bytes_that_are_no_message_are_refused(parts):
    with pytest.raises(MessageError):
        unpack(parts)


@pytest.mark.parametrize(
    "text",
    [
        b'{"v":1,"kind":"credit","request":"r","received":-1,"used":0}',
        b'{"v":1,"kind":"credit","request":"r","received":true,"used":0}',
        b'{"v":1,"kind":"credit","request":"r","received":1}',
        b'{"v":1,"kind":"credit","request":"r","received":1,"used":0,"more":1}',
        b'{"v":2,"kind":"alive","request":"r"}',
        b'{"v":1,"kind":"halt","request":"r"}',
        b'{"v":1,"kind":"alive","request":""}',
        b'{"v":1,"kind":["alive"],"request":"r"}',
        b'{"v":1,"kind":"done","request":"r","decode":NaN}',
        b"[" * 20_000,
    ],
)
def test_ill_formed_messages_are_refused(text):
    with pytest.raises(MessageError):
        unpack([text, b""])


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.floats(1e3, 1e9), st.integers(0, 99))
def test_a_shaped_link_is_as_slow_as_it_says_however_late_its_sender_wakes(sizes, rate, seed):
    shaper, late, now = Shaper(rate), random.Random(seed), 100.0
    for size in sizes:
        departure = shaper.departure(size, 100.0)
        now = max(now, departure) + late.random() * 0.01
        shaper.sent(departure)
    assert departure == pytest.approx(100.0 + sum(sizes) / rate)
    later = shaper.departure(1, now + 50)
    assert later == pytest.approx(now + 50 + 1 / rate), "an idle link saves nothing up"


def test_a_link_that_is_cut_carries_nothing():
    shaper = Shaper(0)
    assert shaper.departure(1, 5.0) == float("inf")
    shaper.rate = None
    assert shaper.departure(1, 5.0) == 5.0
    with pytest.raises(ValueError, match="rate is -1"):
        shaper.rate = -1


def test_a_reserved_chunk_takes_the_link_but_for_one_that_is_cut():
    shaper = Shaper(10)
    assert (shaper.reserve(10, 5.0), shaper.reserve(20, 5.5)) == (6.0, 8.0)
    shaper.rate = 0
    assert shaper.reserve(1, 9.0) == float("inf")
    shaper.rate = 10
    assert shaper.reserve(10, 9.0) == 10.0


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(0, 600), min_size=1, max_size=6), st.integers(50, 700), st.integers(1, 4), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_what_is_put_is_read_and_no_more_than_a_window_is_under_way(sizes, chunk, chunks, overlap, seed):
    window = chunk * chunks
    draw = random.Random(seed)
    pieces = [draw.randbytes(size) for size in sizes]
    out, incoming, shaper = Outgoing(window, chunk), Incoming(window, 1 << 20, overlap=overlap), Shaper()
    read: list[bytes] = []

    def produce():
        for piece in pieces:
            out.put(piece)
        out.complete()

    def consume():
        for piece in pieces:
            read.append(bytes(incoming.read(len(piece))))

    threads = [threading.Thread(target=work, daemon=True) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 5
    while not out.finished and time.monotonic() < until:
        part, _ = out.take(shaper, time.monotonic())
        if part is not None:
            incoming.add(part)
            assert out.sent - out.used <= window + chunk
        out.credit(incoming.received, incoming.used, time.monotonic())
    incoming.end(out.sent)
    for thread in threads:
        thread.join(timeout=10)
    assert read == pieces
    assert incoming.at_end()


def test_neither_side_can_be_made_to_hold_more():
    incoming = Incoming(100, 1000, overlap=True)
    incoming.add(bytes(100))
    incoming.add(bytes(60))
    with pytest.raises(LinkError, match="granted 100"):
        incoming.add(bytes(60))
    whole = Incoming(100, 150, overlap=False)
    whole.add(bytes(60))
    whole.add(bytes(60))
    with pytest.raises(LinkError, match="at most 150"):
        whole.add(bytes(60))
    out = Outgoing(100, 50)
    for received, used in ((10, 5), (5, 10)):
        with pytest.raises(LinkError, match="acknowledged"):
            out.credit(received, used, 0.0)


def test_a_sender_that_waits_for_credit_is_let_go_when_the_transfer_is_given_up():
    out, failed = Outgoing(100, 50), []

    def produce():
        try:
            out.put(bytes(1000))
        except LinkError as error:
            failed.append(str(error))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    out.close("gone")
    thread.join(timeout=5)
    assert failed == ["gone"]


def test_a_frame_that_ends_early_or_fails_is_not_read():
    for how in ("end", "fail"):
        incoming = Incoming(100, 1000, overlap=True)
        incoming.add(b"abc")
        incoming.end(3) if how == "end" else incoming.fail("the link is cut")
        with pytest.raises(FrameError, match="truncated" if how == "end" else "cut"):
            incoming.read(4)
    with pytest.raises(LinkError, match="3 bytes of a frame came; 5 were sent"):
        incoming.end(5)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"chunk_bytes": 0}, "chunk_bytes is 0"), ({"window_bytes": 5}, "window_bytes is 5"),
     ({"patience": 0}, "patience is 0"), ({"deadline": float("inf")}, "deadline is inf")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        LinkSettings(**given)


_BY_TC = """
import importlib.util, socket, subprocess, sys, threading, time
described = importlib.util.spec_from_file_location("shaper", sys.argv[1])  # without the package: it imports in no time
shaper = importlib.util.module_from_spec(described)
described.loader.exec_module(shaper)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
def carry(count):
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    threading.Thread(target=lambda: (near.sendall(bytes(count)), near.close()), daemon=True).start()
    started, got = time.monotonic(), 0
    while data := far.recv(1 << 16):
        got += len(data)
    return got / (time.monotonic() - started)
try:
    with shaper.shaped_by_tc(5e6):
        print("rate", carry(4_000_000))
except shaper.NotPermitted as error:
    print("not permitted", error)
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a network namespace needs root")
def test_the_kernel_shapes_in_a_namespace_of_its_own():
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", _BY_TC, shaper.__file__], capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    if done.returncode or "not permitted" in done.stdout:
        pytest.skip(f"tc may not be used here: {done.stdout or done.stderr}")
    assert 3e6 < float(done.stdout.split()[1]) < 5.5e6
    with pytest.raises(ValueError, match="bytes_per_second is 0"), shaped_by_tc(0):
        pass


def test_a_patient_side_still_says_often_enough_that_it_is_there():
    assert LinkSettings(patience=600.0).heartbeat <= 0.2 * LinkSettings().patience
    assert LinkSettings(patience=0.5).heartbeat == pytest.approx(0.1)
