"""Jobs shared among processes: the results of one process, errors that end the rest, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from tiny import save, tiny_llama

from diffkv_repro.evaluation import workers
from diffkv_repro.evaluation.workers import shared
from diffkv_repro.models import load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("model"))), device="cpu")


@pytest.fixture
def worth(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_WORKERS", 0)


def summed(loaded, job):
    """Logits of a job's tokens, added up; which process did it, with how many threads."""
    return loaded.model(torch.tensor([job])).logits.sum().item(), os.getpid(), torch.get_num_threads()


def written(loaded, job):
    """A file for each job that has begun; the first fails."""
    path, fails = job
    path.touch()
    time.sleep(0.3)
    if fails:
        raise ValueError(f"{path.name} failed")


JOBS = [(3, 4, 5), (6, 7), (8,), (9, 10)]


@pytest.mark.parametrize("reason", ["little to do", "not on disk", "one worker", "one job"])
def test_one_process_where_more_would_not_help(loaded, worth, monkeypatch, reason):
    jobs, options = JOBS, {"tokens": 8, "workers": 2}
    if reason == "little to do":
        monkeypatch.setattr(workers, "_WORTH_WORKERS", 9)
    elif reason == "not on disk":
        loaded = replace(loaded, source=None)
    elif reason == "one worker":
        options["workers"] = 1
    else:
        jobs = JOBS[:1]
    found = list(shared(loaded, summed, jobs, **options))
    assert [job for job, _ in found] == jobs
    assert {process for _, (_, process, _) in found} == {os.getpid()}


def test_processes_of_one_thread_find_what_one_finds(loaded, worth):
    found = dict(shared(loaded, summed, JOBS, tokens=8, workers=2))
    assert set(found) == set(JOBS)
    for job in JOBS:
        total, process, threads = found[job]
        assert total == pytest.approx(summed(loaded, job)[0], rel=1e-5)
        assert process != os.getpid()
        assert threads == 1
    assert not [
        child for child in psutil.Process().children() if child.pid in {process for _, process, _ in found.values()}
    ]


def test_an_error_ends_the_jobs_that_have_not_begun(loaded, worth, tmp_path):
    jobs = [(tmp_path / f"job {index}", index == 0) for index in range(20)]
    with pytest.raises(ValueError, match="job 0 failed"):
        list(shared(loaded, written, jobs, tokens=20, workers=2))
    assert len(list(tmp_path.iterdir())) < 20


def test_no_job_no_process(loaded, worth):
    assert list(shared(loaded, summed, [], tokens=0, workers=2)) == []


_NOTEBOOK = """
import sys
from tests.evaluation.test_workers import napping
from diffkv_repro.evaluation import workers
from diffkv_repro.models import load_model

if __name__ == "__main__":
    workers._WORTH_WORKERS = 0
    loaded = load_model(sys.argv[1], device="cpu")
    for _, process in workers.shared(loaded, napping, range(1000), tokens=1, workers=2):
        print(process, flush=True)
"""


def napping(_loaded, _job):
    time.sleep(0.2)
    return os.getpid()


def test_workers_die_with_their_parent(loaded, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(_NOTEBOOK)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    with subprocess.Popen(
        [sys.executable, script, loaded.source], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        seen = {int(parent.stdout.readline()) for _ in range(8)}
        children = [child for child in psutil.Process(parent.pid).children() if child.pid in seen]
        assert children
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
