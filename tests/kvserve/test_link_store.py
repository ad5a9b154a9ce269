"""A store of frames behind the link, in a process of its own: the contract of a store, and whatever can go wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from link_helpers import cable, client
from vllm_standins import PROMPT, entry, holds

from diffkv_repro.kvserve.connection import Connection
from diffkv_repro.kvserve.frame_server import FrameServer
from diffkv_repro.kvserve.frame_store import FolderStore, FrameMissing, FrameStore, Receipt, open_store
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.keys import load_keys, make_keys
from diffkv_repro.kvserve.library import ProfileLibrary
from diffkv_repro.kvserve.link import LinkError, LinkSettings
from diffkv_repro.kvserve.link_store import PAUSE, LinkStore, StoreAway
from diffkv_repro.kvserve.process import ServerProcess
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.terms import Ask

QUICK = LinkSettings(chunk_bytes=1 << 14, window_bytes=1 << 18, patience=2.0, deadline=30.0, connect=2.0)
BOUND = QUICK.connect + QUICK.patience + 8.0  # a busy machine is slow to wake
MEGABYTES = os.urandom(3_000_000)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


def serve(keys, folder, *more):
    return ServerProcess(["frames", str(folder), "--patience", "2", *more], keys=keys, within=180)


@pytest.fixture(scope="module")
def process(keys, tmp_path_factory):
    with serve(keys, tmp_path_factory.mktemp("frames")) as running:
        yield running


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@contextmanager
def store_at(keys, endpoint, settings=QUICK, **options):
    given = load_keys(keys, "client")
    store = LinkStore(Connection(keys=given, endpoint=endpoint, settings=settings), **options)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def store(keys, process):
    with store_at(keys, process.endpoint) as one:
        yield one


def here(keys, folder, shaper=None):
    """A server of this process, where it is not the process that matters."""
    given = load_keys(keys, "server")
    return FrameServer(FolderStore(folder), keys=given, endpoint="tcp://127.0.0.1:*", settings=QUICK, shaper=shaper)


def halves(data=MEGABYTES):
    yield data[: len(data) // 3]
    yield data[len(data) // 3 :]


def test_it_keeps_the_contract_of_a_store(store):
    assert isinstance(store, FrameStore)
    assert store.find([]) is None
    assert store.find(["a", "b"]) is None
    assert store.put("b", halves()) == len(MEGABYTES)
    assert store.put("a", [b"6"]) == 1
    assert (store.find(["x", "b"]), store.find(["a", "b"])) == (1, 0)
    assert store.get("b", len(MEGABYTES)) == MEGABYTES
    assert store.put("empty", []) == 0
    assert store.get("empty", 0) == b""
    store.discard("a")
    store.discard("a")
    assert store.find(["a"]) is None
    store.acknowledge("b", Receipt(0.5, 0.25, 100))
    assert store.receipts(["c"]) == {}
    assert store.receipts(["b", "c"]) == {"b": Receipt(0.5, 0.25, 100)}
    assert store.receipts(["b"]) == {}
    store.discard("b")


def test_many_names_are_looked_for_at_once(store):
    store.put("last", [b"x"])
    assert store.find([f"{n:040x}" for n in range(8000)] + ["last"]) == 8000
    assert store.receipts([f"{n:040x}" for n in range(1000)]) == {}


def test_what_is_not_there_too_large_or_badly_named_is_said_and_the_link_goes_on(store):
    with pytest.raises(FrameMissing, match="frame c is not in"):
        store.get("c", 10)
    with pytest.raises(FrameMissing, match="allowed are letters and digits"):
        store.get("../c", 10)
    with pytest.raises(StoreAway, match="allowed are letters and digits"):
        store.put("../c", [b"x"])
    store.put("large", [b"12345"])
    with pytest.raises(FrameError, match="more than 4 bytes"):
        store.get("large", 4)
    assert store.get("large", 5) == b"12345"


def test_a_writer_that_fails_leaves_nothing(store):
    def pieces():
        yield MEGABYTES
        raise RuntimeError("encoding failed")

    with pytest.raises(RuntimeError, match="encoding failed"):
        store.put("half", pieces())
    assert store.find(["half"]) is None
    assert store.put("half", [b"x"]) == 1


def test_several_clients_put_and_get_at_the_same_time(keys, process):
    problems = []

    def work(number):
        data = MEGABYTES[number:]
        with store_at(keys, process.endpoint) as own:
            try:
                own.put(f"of{number}", halves(data))
                assert own.get(f"of{number}", len(data)) == data
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


def test_both_directions_are_as_slow_as_the_link_is_shaped(keys, tmp_path):
    with here(keys, tmp_path, Shaper(1e7)) as slow, store_at(keys, slow.endpoint) as store:
        least = len(MEGABYTES) / 1e7
        for work in (lambda: store.put("a", halves()), lambda: store.get("a", len(MEGABYTES))):
            began = time.monotonic()
            work()
            assert least < 1.001 * (time.monotonic() - began) < 4 * least


@pytest.mark.parametrize("way", ["put", "get"])
def test_a_store_that_is_killed_on_the_way_is_one_error_in_time_and_then_none_is_waited_for(keys, tmp_path, way):
    clock, folder = Clock(), tmp_path / "frames"
    FolderStore(folder).put("a", [MEGABYTES])
    with serve(keys, folder, "--gbps", "0.002") as dying, store_at(keys, dying.endpoint, clock=clock) as store:
        assert store.find(["a"]) == 0
        threading.Timer(0.5, dying.kill).start()
        began = time.monotonic()
        with pytest.raises(StoreAway, match=r"the store is away: .*(silent|lost|no connection)"):
            store.put("b", halves()) if way == "put" else store.get("a", len(MEGABYTES))
        assert time.monotonic() - began < BOUND
        began = time.monotonic()
        assert store.find(["a"]) is None
        assert store.receipts(["a"]) == {}
        asked = []
        with pytest.raises(StoreAway, match="not asked again yet"):
            store.put("b", (asked.append(one) for one in "x"))
        with pytest.raises(StoreAway, match="not asked again yet"):
            store.get("a", 10)
        assert (asked, time.monotonic() - began < 0.5) == ([], True), "nothing is encoded for nobody"
        with serve(keys, folder, "--endpoint", dying.endpoint):
            clock.now += PAUSE + 1
            assert store.get("a", len(MEGABYTES)) == MEGABYTES
            assert store.put("b", halves()) == len(MEGABYTES)
    assert [path for path in folder.iterdir() if path.suffix == ".tmp" and time.time() - path.stat().st_mtime < 1] == []


@pytest.mark.parametrize("way", ["put", "get"])
def test_a_cable_that_is_cut_half_way_is_one_error_and_nothing_half_is_kept(keys, tmp_path, way):
    clock = Clock()
    with (
        here(keys, tmp_path) as running,
        cable(running.endpoint) as wire,
        store_at(keys, wire.endpoint, clock=clock) as store,
    ):
        store.put("a", halves())

        def torn():
            yield MEGABYTES[:100_000]
            wire.cut()
            yield MEGABYTES[100_000:]

        wire.after = wire.passed + 500_000 if way == "get" else None
        with pytest.raises(StoreAway, match="the store is away"):
            store.put("b", torn()) if way == "put" else store.get("a", len(MEGABYTES))
        wire.mend()
        clock.now += PAUSE + 1
        assert store.find(["b", "a"]) == 1
        assert store.get("a", len(MEGABYTES)) == MEGABYTES


def test_a_writer_that_dies_is_given_up_and_leaves_nothing(keys, tmp_path):
    code = (
        "import sys, time; from diffkv_repro.kvserve.frame_store import open_store;"
        "from diffkv_repro.kvserve import link_store;"
        "store = open_store(sys.argv[1], keys=sys.argv[2])\n"
        "def pieces():\n    yield b'x' * 100000\n    print('half', flush=True)\n    time.sleep(60)\n"
        "store.put('half', pieces())"
    )
    with serve(keys, tmp_path / "frames") as running:
        dying = subprocess.Popen(
            [sys.executable, "-c", code, running.endpoint, str(keys)], stdout=subprocess.PIPE, text=True
        )
        assert dying.stdout.readline() == "half\n"
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        dying.stdout.close()
        until = time.monotonic() + BOUND
        while list((tmp_path / "frames").glob(".*.tmp")) and time.monotonic() < until:
            time.sleep(0.05)
        assert list((tmp_path / "frames").iterdir()) == []
        with store_at(keys, running.endpoint) as store:
            assert store.put("half", [b"x"]) == 1


def test_strangers_are_told_apart_from_a_store_that_is_away(keys, process, tmp_path):
    make_keys(tmp_path)
    began = time.monotonic()
    with store_at(tmp_path, process.endpoint) as store, pytest.raises(StoreAway, match="is the server's key the right"):
        store.find(["a"])
    (tmp_path / "server.key").write_bytes((keys / "server.key").read_bytes())
    with store_at(tmp_path, process.endpoint) as store, pytest.raises(StoreAway, match="does not know this client's"):
        store.find(["a"])
    assert time.monotonic() - began < 2 * BOUND


def test_a_server_of_another_kind_says_so(keys, tmp_path):
    words = "refused: ask is for another server: this one knows acknowledge, discard"
    with (
        here(keys, tmp_path) as running,
        client(keys, running.endpoint) as one,
        pytest.raises(LinkError, match=words),
    ):
        one.fetch(Ask((1, 2, 3)))


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("tcp://127.0.0.1:1", {"keys": "/nowhere"}, "no key /nowhere"),
        ("tcp://127.0.0.1:99999", {"insecure": True}, "port '99999' is none of 1 to 65535"),
        ("tcp://127.0.0.1", {"insecure": True}, "is no address"),
        ("tcp://127.0.0.1:1", {"insecure": True, "keys": "x"}, "both given"),
        ("tcp://127.0.0.1:1", {"insecure": True, "most_bytes": 9}, "bounds itself"),
        ("a-folder", {"keys": "x"}, "keys is given with a folder"),
    ],
)
def test_addresses_and_keys_that_cannot_be_are_refused_at_once(address, options, words):
    with pytest.raises(ValueError, match=words):
        open_store(address, **options)


def test_a_server_listens_on_no_port_that_is_none(tmp_path):
    with pytest.raises(LinkError, match="port '99999' is none of 1 to 65535"):
        FrameServer(FolderStore(tmp_path), keys=None, endpoint="tcp://127.0.0.1:99999")


def test_engines_hand_prompts_over_through_it_and_learn_from_each_other(engine, process, keys, tmp_path):
    library = tmp_path / "library.yaml"
    ProfileLibrary((entry("quick", "lossless-zstd"),)).save(library)
    link = {"store": process.endpoint, "keys": str(keys), "profiles": str(library)}
    producer, consumer = engine("kv_producer", link), engine("kv_consumer", link)
    producer.serve(PROMPT)
    blocks, loaded = consumer.serve(PROMPT)
    assert (loaded, holds(consumer, blocks, PROMPT)) == (144, True)
    producer.scheduler._plans._polled = -1e9
    producer.serve(PROMPT[::-1])
    assert producer.scheduler._plans.goodput.bandwidth > 0


@pytest.mark.parametrize("harm", ["truncated", "killed", "stranger"])
def test_whatever_happens_to_the_store_costs_an_engine_a_prefill_and_one_line(engine, keys, tmp_path, caplog, harm):
    folder = tmp_path / "frames"
    with serve(keys, folder) as running:
        link = {"store": running.endpoint, "keys": str(keys)}
        engine("kv_producer", link).serve(PROMPT)
        if harm == "stranger":
            make_keys(tmp_path / "others")
            link |= {"keys": str(tmp_path / "others")}
        consumer = engine("kv_consumer", link)
        (path,) = folder.glob("*.kvsf")
        if harm == "truncated":
            path.write_bytes(path.read_bytes()[:-9])
        elif harm == "killed":
            running.kill()
        began = time.monotonic()
        blocks, loaded = consumer.serve(PROMPT)
        assert holds(consumer, blocks, PROMPT)
        assert (loaded, consumer.recomputed) == ((144, len(PROMPT)) if harm == "truncated" else (0, 0))
        assert time.monotonic() - began < 2 * BOUND
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        words = {"truncated": "truncated", "killed": "the store is away", "stranger": "server's key the right one"}
        assert sum(words[harm] in line and "not asked again" not in line for line in said) == 1
        if harm == "truncated":
            assert "frame" in running.said[-1], "the store says that it was damaged"
            assert not path.exists()
