"""Whatever dies, is cut, damaged, slow or strange: every request completes once, in time, with one clear reason."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kvserve_helpers import same
from link_helpers import LAYOUT, QUICK, cable, client, server

from diffkv_repro.kvserve import client as client_module
from diffkv_repro.kvserve.disagg import DecodeWorker
from diffkv_repro.kvserve.keys import make_keys
from diffkv_repro.kvserve.link import LinkError, LinkSettings
from diffkv_repro.kvserve.sources import MadeUpSource
from diffkv_repro.kvserve.terms import Ask

IDS = tuple(range(1, 301))
SOURCE = MadeUpSource(LAYOUT)
BOUND = QUICK.connect + QUICK.patience + 12.0  # a busy machine is slow to wake


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def process(keys):
    with server(keys) as running:
        yield running


def completed(worker, ask, seconds=BOUND):
    """The request's one completion, within a bound, and that it is right."""
    started = time.monotonic()
    done = worker.complete(ask)
    assert time.monotonic() - started < seconds
    if done.how == "recompute" or done.fetched.profile == "none":
        assert same(done.kv, SOURCE.compute(ask.ids).kv)
    assert done.kv.tokens == len(ask.ids)
    return done


def plain(rate=None, ids=IDS):
    return Ask(ids, options={"profile": "none", "rate": rate})


@pytest.mark.parametrize("stage", ["prefill", "send"])
def test_a_server_that_is_killed_is_replaced_by_recomputing(keys, stage):
    # A token takes 20 ms to prefill at the one; at the other the link takes 18 s.
    shape = "24x2x32@0.02" if stage == "prefill" else "24x2x32"
    arguments = ["prefill", "--made-up", shape, "--profiles", "int4", "--tokens", "32", "--experiment"]
    from diffkv_repro.kvserve.process import ServerProcess

    with ServerProcess(arguments, keys=keys) as dying, client(keys, dying.endpoint) as one:
        SOURCE.compute(IDS)
        if stage == "send":
            one.fetch(plain(ids=IDS[:8]))
        threading.Timer(0.5, dying.kill).start()
        done = completed(DecodeWorker(SOURCE, one), plain(1e5 if stage == "send" else None))
        assert done.how == "recompute"
        assert "silent" in done.reason or "lost" in done.reason
        again = completed(DecodeWorker(SOURCE, one), plain())
    assert "no connection" in again.reason or "lost" in again.reason or "silent" in again.reason


def test_a_client_that_dies_does_not_keep_the_next_one_waiting(process, keys):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import link_helpers as h;"
        "from diffkv_repro.kvserve.client import Ask; c = h.client(Path(sys.argv[1]), sys.argv[2]); c.connect();"
        "print('in', flush=True);"
        "c.fetch(Ask(tuple(range(1, 301)), options={'profile': 'none', 'rate': 1e5}))"
    )
    tests = str(Path(__file__).resolve().parents[1])
    dying = subprocess.Popen(
        [sys.executable, "-c", code, str(keys), process.endpoint, tests], stdout=subprocess.PIPE, text=True
    )
    assert dying.stdout.readline().strip() == "in"
    time.sleep(0.5)
    dying.kill()
    dying.wait()
    dying.stdout.close()
    with client(keys, process.endpoint, LinkSettings(patience=20.0, connect=5.0)) as one:
        assert completed(DecodeWorker(SOURCE, one), plain(), 40.0).how == "transfer"


def test_a_link_that_is_cut_and_mended_loses_no_request(process, keys):
    with cable(process.endpoint) as wire, client(keys, wire.endpoint) as one:
        worker = DecodeWorker(SOURCE, one)
        assert completed(worker, plain()).how == "transfer"
        wire.passed, wire.after = 0, 400_000  # in the middle of the next
        cut = completed(worker, plain())
        assert cut.how == "recompute"
        assert completed(worker, plain()).how == "recompute"
        wire.mend()
        until = time.monotonic() + BOUND
        hows = []
        while "transfer" not in hows and time.monotonic() < until:
            hows.append(completed(worker, plain()).how)
        assert hows[-1] == "transfer"


def test_a_thousand_damaged_frames_are_all_refused(keys):
    from damaging_server import LAYOUT as SMALL

    script = Path(__file__).resolve().parents[1] / "damaging_server.py"
    running = subprocess.Popen([sys.executable, str(script), str(keys)], stdout=subprocess.PIPE, text=True)
    try:
        endpoint = running.stdout.readline().split()[-1]
        source, reasons = MadeUpSource(SMALL), []
        with client(keys, endpoint, layout=SMALL) as one:
            worker = DecodeWorker(source, one)
            asks = [Ask((number % 7, 5), options={"profile": ["none", "int4"][number % 2]}) for number in range(1001)]
            done = [worker.complete(ask) for ask in asks]
        assert done[0].how == "transfer"
        assert {one.how for one in done[1:]} == {"recompute"}
        for ask, one in zip(asks, done, strict=True):
            assert same(one.kv, source.compute(ask.ids).kv)
        reasons = [one.reason for one in done[1:]]
        assert all(reasons)
        assert not any("silent" in reason or "no connection" in reason for reason in reasons), "refused at once"
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def test_a_client_with_another_key_is_not_let_in(process, keys, tmp_path):
    make_keys(tmp_path / "others")
    (tmp_path / "others" / "server.key").write_bytes((keys / "server.key").read_bytes())
    with client(tmp_path / "others", process.endpoint) as stranger:
        done = completed(DecodeWorker(SOURCE, stranger), plain())
        assert "the server does not know this client's key" in done.reason
    make_keys(tmp_path / "wrong")
    with client(tmp_path / "wrong", process.endpoint) as misled, pytest.raises(LinkError, match="no connection"):
        misled.connect()
    with client(keys, process.endpoint) as known:
        assert completed(DecodeWorker(SOURCE, known), plain()).how == "transfer"


def test_a_slow_reader_gets_all_of_it_and_is_not_given_up(process, keys, monkeypatch):
    quick = client_module.receive

    def slow(*arguments, **options):
        for layer in quick(*arguments, **options):
            time.sleep(0.05)
            yield layer

    monkeypatch.setattr(client_module, "receive", slow)
    with client(keys, process.endpoint) as one:
        done = completed(DecodeWorker(SOURCE, one), plain())
    assert done.how == "transfer"
    assert done.seconds > 24 * 0.05


def test_a_request_has_a_deadline(process, keys):
    hasty = LinkSettings(chunk_bytes=1 << 14, window_bytes=1 << 18, patience=3.0, deadline=1.0)
    with client(keys, process.endpoint, hasty) as one:
        done = completed(DecodeWorker(SOURCE, one), plain(1e5))
        assert "not finished within 1 s" in done.reason
        again = completed(DecodeWorker(SOURCE, one), plain(ids=IDS[:40]))
        assert again.how == "transfer", "what is still under way of the first is not taken for the second"
