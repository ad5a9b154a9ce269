"""The prefix store: longest prefix, least recently used goes, nothing half-written, several processes at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from kvserve_helpers import same
from link_helpers import QUICK

from diffkv_repro.core.files import WriteError
from diffkv_repro.kvserve import NAMED, FrameError, Profile
from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.disagg import DecodeWorker, measure_streams
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.link import LinkError
from diffkv_repro.kvserve.server import KVServer
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.sources import MadeUpSource
from diffkv_repro.kvserve.store import PrefixStore, StoreError
from diffkv_repro.kvserve.store_worker import StoreWorker, fill
from diffkv_repro.kvserve.terms import Ask

LAYOUT = KVLayout(3, 1, 8, torch.float16, model="made up")
SOURCE = MadeUpSource(LAYOUT, kept=8)
PLAIN = Profile()


def put(store, ids, form="none", profile=PLAIN):
    return store.put(ids, form, profile, SOURCE.compute(ids))


def test_what_is_put_is_found_and_read(tmp_path):
    store = PrefixStore(tmp_path, LAYOUT, block=8)
    ids = tuple(range(50))
    entry = put(store, ids)
    assert entry.nbytes == entry.path.stat().st_size == store.nbytes
    match = store.find(ids)
    assert (match.tokens, match.whole) == (50, 50)
    assert same(store.read(match.forms["none"]).decode(), SOURCE.compute(ids).kv)
    assert b"".join(store.pieces(entry)) == entry.path.read_bytes()
    assert put(store, ids) == entry, "it is there already"
    again = PrefixStore(tmp_path, LAYOUT, block=8)
    assert again.find(ids).forms["none"] == entry


@pytest.mark.parametrize("stored", [(40,), (16, 40), (8, 16, 40)])
@pytest.mark.parametrize("shared", [0, 7, 8, 15, 16, 33, 40])
def test_the_longest_stored_prefix_is_found(tmp_path, stored, shared):
    store = PrefixStore(tmp_path, LAYOUT, block=8)
    for count in stored:
        put(store, tuple(range(count)))
    asked = (*range(shared), *range(1000, 1020))
    match = store.find(asked)
    by_hand = min(max(stored), shared) // 8 * 8
    assert (match.tokens if match else 0) == by_hand
    if match:
        assert match.whole == min(count for count in stored if count >= by_hand)


def test_the_least_recently_used_go_first(tmp_path):
    first = put(PrefixStore(tmp_path / "size", LAYOUT, block=8), tuple(range(40))).nbytes
    store = PrefixStore(tmp_path / "own", LAYOUT, block=8, limit_bytes=int(3.5 * first))
    prompts = [tuple(range(start, start + 40)) for start in (0, 100, 200, 300)]
    for ids in prompts[:3]:
        put(store, ids)
        time.sleep(0.01)
    list(store.pieces(store.find(prompts[0]).forms["none"]))
    put(store, prompts[3])
    assert [store.find(ids) is not None for ids in prompts] == [True, False, True, True]
    assert store.nbytes <= store.limit_bytes


def test_a_store_that_is_too_small_says_so_and_keeps_what_it_has(tmp_path):
    store = PrefixStore(tmp_path, LAYOUT, block=8, limit_bytes=4000)
    kept = put(store, tuple(range(8)))
    with pytest.raises(StoreError, match="more than the 4000 bytes"):
        put(store, tuple(range(400)))
    assert store.entries == [kept]
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [kept.path.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")  # noqa: PTH110
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    store = PrefixStore(tmp_path, LAYOUT, block=8)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        put(store, tuple(range(16)))
    monkeypatch.undo()
    assert store.entries == []
    assert not list(tmp_path.glob("*.kvsf"))
    assert put(store, tuple(range(16))).path.exists()


def test_files_that_are_no_whole_frame_are_removed_on_opening(tmp_path):
    store = PrefixStore(tmp_path, LAYOUT, block=8)
    good, cut, foreign = (put(store, tuple(range(start, start + 24))) for start in (0, 50, 90))
    cut.path.write_bytes(cut.path.read_bytes()[:-5])
    (tmp_path / f"{'0' * 32}.none.kvsf").write_bytes(foreign.path.read_bytes())
    (tmp_path / ".x.kvsf.abc.tmp").write_bytes(b"half")
    (tmp_path / "empty.kvsf").touch()
    again = PrefixStore(tmp_path, LAYOUT, block=8)
    assert {entry.path for entry in again.entries} == {good.path, foreign.path}
    assert {path.name for path in tmp_path.iterdir()} == {".lock", good.path.name, foreign.path.name}
    other = KVLayout(3, 1, 8, torch.float16, model="another")
    assert PrefixStore(tmp_path, other, block=8).entries == []


def test_a_changed_byte_is_found_when_an_entry_is_read(tmp_path):
    store = PrefixStore(tmp_path, LAYOUT, block=8)
    entry = put(store, tuple(range(24)))
    data = bytearray(entry.path.read_bytes())
    data[-3] ^= 1
    entry.path.write_bytes(data)
    with pytest.raises(FrameError, match="damaged"):
        store.read(entry)
    assert not entry.path.exists()
    with pytest.raises(StoreError, match="is gone"):
        list(store.pieces(entry))


_WRITER = """
import sys, time, torch
from pathlib import Path
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.sources import MadeUpSource
from diffkv_repro.kvserve.store import PrefixStore
layout = KVLayout(3, 1, 8, torch.float16, model="made up")
class Slow(Profile):
    def stream(self, *arguments, **options):
        for piece in Profile.stream(self, *arguments, **options):
            yield piece
            print("piece", flush=True)
            time.sleep(float(sys.argv[2]))
store, source = PrefixStore(Path(sys.argv[1]), layout, block=8), MadeUpSource(layout)
for start in range(0, int(sys.argv[3])):
    ids = tuple(range(100 * start, 100 * start + 24))
    store.put(ids, "none", Slow(), source.compute(ids))
print("done", flush=True)
"""


def writer(folder, pause, count):
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(pause), str(count)], stdout=subprocess.PIPE, text=True
    )


def test_a_writer_that_is_killed_leaves_no_entry_and_no_lock(tmp_path):
    PrefixStore(tmp_path, LAYOUT, block=8)
    process = writer(tmp_path, 30, 1)
    assert process.stdout.readline() == "piece\n"
    assert list(tmp_path.glob(".*.tmp")), "it is in the middle of writing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = PrefixStore(tmp_path, LAYOUT, block=8, patience=5)
    assert store.entries == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert put(store, tuple(range(24))).path.exists()


def test_two_writers_of_the_same_prompts_leave_each_whole(tmp_path):
    store = PrefixStore(tmp_path, LAYOUT, block=8)
    processes = [writer(tmp_path, 0.001, 12) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=120)[0].endswith("done\n")
        assert process.returncode == 0
    assert len(store.entries) == 12
    for entry in store.entries:
        start = 100 * next(n for n in range(12) if store.find(range(100 * n, 100 * n + 24)).forms["none"] == entry)
        assert same(store.read(entry).decode(), SOURCE.compute(range(start, start + 24)).kv)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store of one prompt behind a link of 1 MB/s, and a client of it."""
    layout = KVLayout(6, 2, 32, torch.float16, model="made up")
    source, store = MadeUpSource(layout), PrefixStore(tmp_path_factory.mktemp("store"), layout, block=16)
    ids = tuple(range(200))
    fill(store, source, ids, {"int4": NAMED["int4"]})
    measured = measure_streams({"int4": NAMED["int4"]}, source, ids, repeats=1)
    worker = StoreWorker(store, measured)
    with (
        KVServer(worker, keys=None, endpoint="tcp://127.0.0.1:*", shaper=Shaper(1e6), experiment=True) as own,
        KVClient(layout, keys=None, endpoint=own.endpoint, settings=QUICK) as one,
    ):
        one.fetch(Ask(ids, options={"profile": "none"}))
        yield DecodeWorker(source, one), ids


def test_a_prefix_comes_from_the_store_and_the_rest_is_computed(served):
    worker, ids = served
    asked = (*ids[:100], *range(5000, 5030))
    done = worker.complete(Ask(asked, options={"profile": "none"}))
    assert done.how == "transfer"
    assert done.fetched.kv.tokens == 96
    assert same(done.kv, worker.source.compute(asked).kv)


def test_the_controller_takes_the_form_that_arrives_first(served):
    worker, ids = served
    done = worker.complete(Ask(ids))
    assert done.fetched.profile == "int4"
    assert done.fetched.stages.send < 0.2


@pytest.mark.parametrize(
    ("terms", "reason"), [({"recompute": 1e-3}, "recomputing is faster"), ({"slo": 1e-3}, "the SLO of 0.001 s is not")]
)
def test_what_takes_too_long_to_load_is_recomputed(served, terms, reason):
    worker, ids = served
    done = worker.complete(Ask(ids, **terms))
    assert done.how == "recompute"
    assert reason in done.reason
    assert same(done.kv, worker.source.compute(ids).kv)


def test_what_is_not_stored_is_recomputed(served):
    worker, ids = served
    done = worker.complete(Ask(ids[1:]))
    assert (done.how, "no prefix" in done.reason) == ("recompute", True)
    with pytest.raises(LinkError, match="not stored as 'zip'"):
        worker.client.fetch(Ask(ids, options={"profile": "zip"}))
