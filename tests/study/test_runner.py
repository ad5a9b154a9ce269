"""The runner on a small project: real papermill, real kernels, every way a run can go wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
import torch
from small_project import GOOD, OTHER, PARAMETERS, write_notebook

from diffkv_repro.study.notebooks import (
    NotebookError,
    find_notebooks,
    parameters_for,
    parse_settings,
    profile_parameters,
)
from diffkv_repro.study.runner import RunRefused, locked

SLOW = "import time, pathlib\npathlib.Path(output + '.started').touch()\ntime.sleep(60)\n"


def cli(project, *arguments, timeout=120):
    environment = os.environ | {"DIFFKV_REPRO_ROOT": str(project), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "diffkv_repro.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def reproduce(project, *arguments):
    return cli(project, "reproduce", "--output", str(project / "out"), *arguments)


def test_a_good_run_resumes_and_checks(project):
    done = reproduce(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "90_good: ok" in done.stdout
    assert "3 pass, 0 refuted, 0 fail, 0 not run" in done.stdout
    state = json.loads((project / "out" / "run.json").read_text())
    assert {entry["outcome"]["status"] for entry in state["notebooks"].values()} == {"ok"}
    assert all(entry["outcome"]["peak_bytes"] > 10 << 20 for entry in state["notebooks"].values())
    assert (project / "out" / "index.html").is_file()

    again = reproduce(project, "--resume")
    assert again.returncode == 0
    assert again.stdout.count("done by the run that is resumed") == 2
    assert "3 pass" in again.stdout, "what was resumed counts as this run's"

    write_notebook(project / "notebooks" / "91_other.ipynb", PARAMETERS, "1 / 0")
    changed = reproduce(project, "--resume")
    assert changed.returncode == 1
    assert "90_good: done by the run that is resumed" in changed.stdout
    assert "91_other: failed" in changed.stdout, "a changed notebook runs again"

    checked = cli(project, "check", "--output", str(project / "out"), "--json")
    assert checked.returncode == 0
    verdicts = {claim["id"]: claim["verdict"] for claim in json.loads(checked.stdout)}
    assert verdicts == {
        "diffkv-fig90-nine": "pass",
        "diffkv-fig90-big": "pass",
        "diffkv-fig91-one": "pass",
        "diffkv-fig92-far": "not run",
    }
    listed = json.loads(cli(project, "figures", "--output", str(project / "out"), "--json").stdout)
    assert [row["id"] for row in listed] == ["diffkv-fig90", "diffkv-fig91", "diffkv-fig92"]
    assert listed[0]["files"] == ["diffkv-fig90.json"]


def test_resume_repeats_what_lost_its_record(project):
    assert reproduce(project).returncode == 0
    (project / "out" / "diffkv-fig91.json").unlink()
    again = reproduce(project, "--resume")
    assert again.returncode == 0
    assert again.stdout.count("done by the run that is resumed") == 1
    assert "3 pass" in again.stdout

    # A new run that was stopped before its first notebook ended owns nothing of the earlier one's.
    state = json.loads((project / "out" / "run.json").read_text())
    (project / "out" / "run.json").write_text(json.dumps(state | {"run": "another"}))
    assert "done by the run" not in reproduce(project, "--resume").stdout


def test_resume_repeats_what_depends_on_a_changed_file(project):
    weights = project / "weights.bin"
    weights.write_bytes(b"1")
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS + "nine = 9\nmodel = 'm'\n", GOOD)
    arguments = ("--only", "90", "--set", f"model={weights}")
    assert reproduce(project, *arguments).returncode == 0
    assert "done by the run" in reproduce(project, *arguments, "--resume").stdout
    weights.write_bytes(b"12")
    assert "done by the run" not in reproduce(project, *arguments, "--resume").stdout


def test_settings_never_touch_the_committed_figures(project):
    done = cli(project, "reproduce", "--only", "90", "--set", "nine=9.0")
    assert done.returncode == 0
    assert (project / "results" / "custom" / "diffkv-fig90.json").is_file()
    assert not (project / "figures").exists()


def test_a_path_in_a_setting_is_the_callers(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "tiny").mkdir()
    notebooks = find_notebooks(project)
    assert parse_settings(["nine=tiny"], notebooks) == {"nine": str(project / "tiny")}
    assert parse_settings(["nine=huge"], notebooks) == {"nine": "huge"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_profile_without_a_gpu_is_refused(project):
    done = reproduce(project, "--profile", "gpu")
    assert done.returncode == 2
    assert "profile gpu needs an NVIDIA GPU, and torch finds none" in done.stderr


def test_a_failing_notebook_is_quoted_and_does_not_stop_the_others(project):
    cell = "before = 1\nraise KeyError('the reason')"
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS, "print('done first')", cell, "never = 1")
    done = reproduce(project)
    assert done.returncode == 1
    assert "90_good: failed" in done.stdout
    assert "    | raise KeyError('the reason')" in done.stdout
    assert "KeyError: 'the reason'" in done.stdout
    assert "91_other: ok" in done.stdout
    assert "1 of 2 notebooks did not end well: 90_good" in done.stdout
    kept = nbformat.read(project / "out" / "executed" / "90_good.ipynb", as_version=4)
    assert any("done first" in str(cell.get("outputs")) for cell in kept.cells)


def test_a_failing_claim_fails_the_run(project):
    done = reproduce(project, "--only", "90", "--set", "nine=8")
    assert done.returncode == 1
    assert "1 claims fail" in done.stdout
    assert "ClaimFailed" in done.stdout


def test_a_run_that_checks_nothing_fails(project):
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS, "x = 1")
    done = reproduce(project, "--only", "90_good")
    assert done.returncode == 1
    assert "nothing was checked" in done.stdout


def test_an_old_record_does_not_count_for_a_new_run(project):
    assert reproduce(project, "--only", "90").returncode == 0
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS, "x = 1")
    assert "nothing was checked" in reproduce(project, "--only", "90").stdout


def test_a_smoke_run_judges_only_any_size_claims(project):
    done = reproduce(project, "--profile", "smoke", "--only", "90")
    assert done.returncode == 0
    assert "1 pass, 0 refuted, 0 fail, 1 not run" in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [("--notebook-timeout", "the notebook ran longer than 8 s"), ("--cell-timeout", "a cell ran longer than 8 s")],
)
def test_timeouts_end_the_notebook_and_its_kernel(project, option, message):
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS, SLOW)
    done = reproduce(project, "--only", "90", option, "8")
    assert done.returncode == 1
    assert "90_good: timeout" in done.stdout
    assert message in done.stdout
    assert "    | time.sleep(60)" in done.stdout, "the cell is quoted"
    assert " 0.00 " not in done.stdout, "peak memory is known all the same"
    assert not kernels_of(project)


def kernels_of(project):
    """Processes that still work for ``project``."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(project) in process.environ().get("DIFFKV_REPRO_ROOT", "") and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_resumes(project, number):
    write_notebook(project / "notebooks" / "91_other.ipynb", PARAMETERS, SLOW)
    environment = os.environ | {"DIFFKV_REPRO_ROOT": str(project)}
    command = [sys.executable, "-m", "diffkv_repro.cli", "reproduce", "--output", str(project / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not (project / "out.started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)

    second = reproduce(project)
    assert second.returncode == 2
    assert f"another run is writing to {project / 'out'}" in second.stderr

    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == (-number if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or "--resume goes on where it stopped" in errors
    deadline = time.monotonic() + 15
    while kernels_of(project) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not kernels_of(project), "no kernel is left behind"
    write_notebook(project / "notebooks" / "91_other.ipynb", PARAMETERS, OTHER)
    resumed = reproduce(project, "--resume")
    assert "90_good: done by the run that is resumed" in resumed.stdout
    assert (resumed.returncode, "3 pass" in resumed.stdout) == (0, True)


def test_a_kernel_that_dies_is_said_so(project):
    write_notebook(project / "notebooks" / "90_good.ipynb", PARAMETERS, "import os, signal\nos.kill(os.getpid(), 9)")
    done = reproduce(project, "--only", "90")
    assert done.returncode == 1
    assert "90_good: crashed" in done.stdout
    assert "the kernel died" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "tiny"], "unknown profile 'tiny'; there are smoke, cpu, gpu, full"),
        (["--only", "90,55"], "unknown notebook '55'; there are 90_good, 91_other"),
        (["--only", ","], "--only ',' names no notebook"),
        (["--set", "ten=10"], "--set 'ten=10': must be name=value, with a name among nine"),
        (["--set", "seed=10"], "with a name among nine"),
        (["--set", "nine"], "must be name=value"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(project, arguments, message):
    done = reproduce(project, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (project / "out").exists()


def test_an_unknown_parameter_in_a_profile_is_refused(project):
    (project / "notebooks" / "profiles.yaml").write_text("cpu:\n  90_good: {nein: 9}\n")
    done = reproduce(project)
    assert done.returncode == 2
    assert "notebook 90_good has no parameter nein; it has nine" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu:\n  90_goood: {nine: 9}\n", "profiles.yaml: cpu: unknown notebook 90_goood"),
        ("cpu: [1]\n", "profiles.yaml: cpu must map each notebook to its values, is [1]"),
        ("cpu:\n  90_good: 3\n", "profiles.yaml: cpu: 90_good must map each parameter to its values"),
        ("cpus: {}\n", "profiles.yaml: unknown profile cpus"),
        ("cpu: [", "profiles.yaml is not YAML"),
    ],
)
def test_a_profile_that_would_be_ignored_is_refused(project, text, message):
    (project / "notebooks" / "profiles.yaml").write_text(text)
    with pytest.raises(NotebookError, match=re.escape(message)):
        profile_parameters(project, "cpu")


@pytest.mark.parametrize("text", ["{", '{"profile": "cpu", "notebooks": {}}', '{"profile": "cpu", "notebooks": 3}'])
def test_a_damaged_state_is_not_resumed(project, text):
    (project / "out").mkdir()
    (project / "out" / "run.json").write_text(text)
    done = reproduce(project, "--resume")
    assert done.returncode == 2
    assert "run.json is damaged" in done.stderr


def test_an_output_folder_that_cannot_be_written(project):
    (project / "file").write_text("")
    with pytest.raises(RunRefused, match=r"cannot write to output folder .*file/out"), locked(project / "file" / "out"):
        raise AssertionError("must not get here")


def test_check_of_nothing_fails(project):
    (project / "out").mkdir()
    done = cli(project, "check", "--output", str(project / "out"))
    assert done.returncode == 1
    assert "nothing was checked" in done.stderr
    assert "unknown figure 'fig1'" in cli(project, "check", "--figure", "fig1").stderr
    assert "there is no folder" in cli(project, "check", "--output", str(project / "none")).stderr


def test_parameters(project):
    (good, other) = find_notebooks(project)
    assert good.parameters == {"profile": "cpu", "output": "out", "seed": 0, "nine": 9}
    settings = parse_settings(["nine=[1, 2.5]"], [good, other])
    assert settings == {"nine": [1, 2.5]}
    assert parse_settings(["nine=a/b:c"], [good]) == {"nine": "a/b:c"}
    handed = parameters_for(other, profile="cpu", given={}, output=project, seed=3, extra=settings)
    assert handed == {"profile": "cpu", "output": str(project), "seed": 3}, "only what the notebook knows"
    with pytest.raises(NotebookError, match="parameter seed is set by the runner"):
        parameters_for(good, profile="cpu", given={"seed": 1}, output=project, seed=3, extra={})


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (PARAMETERS + "n: int = 3", "may only hold lines like name = literal"),
        (PARAMETERS + "n = 2 * 3 * x", "parameter n is not a plain literal"),
        ("n = 3", "lacks profile, output, seed"),
        (PARAMETERS + "%matplotlib inline", "is not plain Python"),
    ],
)
def test_a_parameters_cell_papermill_could_misread_is_refused(project, cell, message):
    write_notebook(project / "notebooks" / "90_good.ipynb", cell)
    with pytest.raises(NotebookError, match=message):
        find_notebooks(project)
