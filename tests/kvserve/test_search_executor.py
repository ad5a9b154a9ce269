"""Evaluation in processes and on Ray, with workers that die, and searches that are killed and go on."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from search_helpers import REDUCED, Broken, Ruled, quality_of, ratio_of, reduced_pool

from diffkv_repro.core.finished import Finished
from diffkv_repro.kvserve.driver import SearchError, drive, measure_ratios, summary
from diffkv_repro.kvserve.executor import Processes, Serial, executor
from diffkv_repro.kvserve.search import Search, SearchSettings

TESTS = Path(__file__).resolve().parents[1]
POOL = reduced_pool()
SETTINGS = SearchSettings(min_quality=0.93, budget=14, cold_start=5)


def qualities(runner, profiles):
    return dict(runner.run("evaluate", profiles))


def test_processes_answer_as_one_does_and_replace_a_worker_that_dies(tmp_path):
    few = REDUCED[::30]
    with Processes(partial(Ruled, deadly=few[2].digest, remember=str(tmp_path)), 2) as runner:
        assert runner.slots == 2
        assert qualities(runner, few) == qualities(Serial(Ruled), few)
        assert (tmp_path / few[2].digest).exists()
        assert dict(runner.run("ratio", few)) == {i: {"ratio": ratio_of(profile)} for i, profile in enumerate(few)}
        assert list(runner.run("evaluate", [])) == []
    found = qualities(Serial(Ruled), few)
    assert {place: answer["quality"] for place, answer in found.items()} == {
        place: quality_of(profile) for place, profile in enumerate(few)
    }


def test_a_search_outlives_its_workers(tmp_path):
    asked = Search(POOL, SETTINGS).ask(5)
    with Processes(partial(Ruled, deadly=REDUCED[asked[1]].digest), 2) as runner:
        done = drive(Search(POOL, SETTINGS), REDUCED, runner, Finished(tmp_path / "s.sqlite", {}), batch=2)
    assert done.failed == {asked[1]: "its worker died 2 times"}
    assert done.iterations == len({step.index for step in done.steps}) <= 14
    assert done.best is not None


def test_an_evaluator_that_raises_fails_its_profile_alone(tmp_path):
    found = qualities(Serial(Broken), REDUCED[::60])
    assert {("failure" in answer) for answer in found.values()} == {True, False}
    done = drive(Search(POOL, SETTINGS), REDUCED, Serial(Broken), Finished(tmp_path / "s.sqlite", {}))
    assert done.failed
    assert set(done.failed.values()) == {"RuntimeError: no such kernel"}
    with pytest.raises(SearchError, match="every evaluation failed: RuntimeError: no such kernel"):
        drive(Search(POOL, SETTINGS), REDUCED, Serial(partial(Broken, True)), Finished(None, {}))


def test_ratios_are_measured_once(tmp_path):
    store, log = Finished(tmp_path / "s.sqlite", {}), []

    class Counted(Ruled):
        def ratio(self, profile):
            log.append(profile.digest)
            return ratio_of(profile)

    few = REDUCED[:7]
    seen = []
    for _ in range(2):
        profiles, ratios = measure_ratios(
            few, Serial(Counted), store, watch=lambda done, total: seen.append((done, total))
        )
        assert profiles == few
        assert ratios.tolist() == [ratio_of(profile) for profile in few]
    assert len(log) == 7
    assert seen == [(n, 7) for n in range(1, 8)]


_KILLED = """
import json, sys
from pathlib import Path
from diffkv_repro.core.finished import Finished
from diffkv_repro.kvserve.driver import drive, summary
from diffkv_repro.kvserve.executor import executor
from diffkv_repro.kvserve.search import Search, SearchSettings
from functools import partial
from search_helpers import REDUCED, Ruled, reduced_pool

if __name__ == "__main__":
    folder, spec = Path(sys.argv[1]), sys.argv[2]
    settings = SearchSettings(min_quality=0.93, budget=14, cold_start=5)
    with executor(spec, partial(Ruled, log=str(folder / "log"), seconds=0.15)) as workers:
        store = Finished(folder / "store.sqlite", {"of": "test"})
        done = drive(Search(reduced_pool(), settings), REDUCED, workers, store, batch=2)
    (folder / "result.json").write_text(json.dumps(summary(done, REDUCED)))
"""


@pytest.mark.parametrize(("spec", "until"), [("serial", 9), ("processes:2", 4)])
def test_killed_and_resumed_ends_as_if_it_had_not_been(tmp_path, spec, until):
    script = tmp_path / "run.py"
    script.write_text(_KILLED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, str(script), str(tmp_path), spec]
    log = tmp_path / "log"

    def begun() -> list[str]:
        return log.read_text().split() if log.exists() else []

    stored = Finished(tmp_path / "store.sqlite", {"of": "test"})
    by_digest = {profile.digest for profile in REDUCED}
    running = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 300
    while len(begun()) < until and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    time.sleep(1.3)  # workers notice within a second
    known = {digest for digest in by_digest if stored.get(("quality", digest)) is not None}
    before = len(begun())
    assert until - 2 <= len(known) < 14
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert not known & set(begun()[before:])  # what was stored is not evaluated again
    uninterrupted = drive(Search(POOL, SETTINGS), REDUCED, Serial(Ruled), Finished(None, {}), batch=2)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found == json.loads(json.dumps(summary(uninterrupted, REDUCED)))


@pytest.mark.parametrize("spec", ["threads", "processes:0", "ray://", "ray:x", ""])
def test_unknown_executors_are_refused(spec):
    with pytest.raises(ValueError, match="allowed are serial, processes"):
        executor(spec, Ruled)


def test_ray_is_asked_for_by_name():
    try:
        import ray  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install 'diffkv-repro\[ray\]'"):
            executor("ray", Ruled)


def test_ray_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # actors have to find the helpers here
    few = REDUCED[:6]
    with executor("ray:2", partial(Ruled, deadly=few[1].digest, remember=str(tmp_path))) as runner:
        assert runner.slots == 2
        found = qualities(runner, few)
        assert {place: answer["quality"] for place, answer in found.items()} == {
            place: quality_of(profile) for place, profile in enumerate(few)
        }
        together = drive(Search(POOL, SETTINGS), REDUCED, runner, Finished(None, {}), batch=2)
    alone = drive(Search(POOL, SETTINGS), REDUCED, Serial(Ruled), Finished(None, {}), batch=2)
    assert together.steps == alone.steps
    with executor("ray:2", partial(Ruled, deadly=few[1].digest)) as runner:
        assert qualities(runner, few)[1]["failure"].startswith("its worker died 2 times")
