import subprocess
from datetime import datetime

import pytest

from diffkv_repro.core.provenance import Provenance, capture, commit_of
from diffkv_repro.core.timing import peak_memory, time_pairs


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_commit_says_whether_anything_but_figures_was_changed(tmp_path):
    assert commit_of(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "figures").mkdir()
    for name in ("a.py", "figures/b.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = commit_of(tmp_path)
    assert len(clean) == 10
    (tmp_path / "figures" / "b.json").write_text("2")
    assert commit_of(tmp_path) == clean
    (tmp_path / "new.py").write_text("1")
    assert commit_of(tmp_path) == clean + "+", "a module that is not committed yet counts"
    (tmp_path / "new.py").unlink()
    (tmp_path / "a.py").write_text("2")
    assert commit_of(tmp_path) == clean + "+"


def test_capture_holds_what_a_reader_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFKV_REPRO_RUN", "run7")
    found = capture(root=tmp_path, seed=3, profile="cpu", config={"model": "m"}).as_dict()
    assert (found["seed"], found["run"], found["profile"]) == (3, "run7", "cpu")
    assert found["config"] == {"model": "m"}
    assert {"torch", "transformers", "numpy", "diffkv-repro"} <= set(found["versions"])
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert found["device"]


@pytest.mark.parametrize(("commit", "shown"), [("0d91828565", "0d91828565"), ("0d91828565+", "0d91828565+"),
                                               ("0d91828565" * 4, "0d91828565"), ("unknown", "unknown")])  # fmt: skip
def test_a_foot_shows_a_commit_in_ten_digits(commit, shown):
    assert f"commit {shown} ·" in Provenance("a GPU", "2026-11-30", commit, "3.12", {}, seed=0).summary()


def test_pairs_are_timed_in_turn_after_one_uncounted_pair():
    calls = []
    times = time_pairs(lambda: calls.append("call"), lambda: calls.append("base"), repeats=3)
    assert calls == ["base", "call"] * 4
    assert len(times.ratios) == len(times.call) == 3
    assert times.spread[0] <= times.ratio <= times.spread[1]


def test_peak_memory_sees_what_was_freed_again():
    import torch

    with peak_memory() as seen:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        torch.ones(1)
        import time

        time.sleep(0.05)
        del block
    assert 60 << 20 < seen.growth < 160 << 20
