"""``diffkv-repro reproduce``: every notebook in a process of its own, resumable, with a scoreboard at the end."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import psutil

from diffkv_repro.core.files import write_text
from diffkv_repro.study.execute import Job, Outcome
from diffkv_repro.study.notebooks import Notebook, NotebookError, code_cells

_GRACE = 10.0
_POLL = 0.5
CELL_TIMEOUT = {"smoke": 300, "cpu": 1800, "gpu": 1800, "full": 6 * 3600}
NOTEBOOK_TIMEOUT = {"smoke": 600, "cpu": 3600, "gpu": 3600, "full": 48 * 3600}


class RunRefused(RuntimeError):
    """A run that must not start: the output folder is in use, or cannot be written."""


@dataclass(frozen=True)
class Step:
    """A notebook to run with everything it is given."""

    notebook: Notebook
    parameters: dict[str, Any]

    def key(self, code: str) -> str:
        """Identity of what this step would do: its source, its parameters and the package's code."""
        document = json.dumps([self.notebook.path.read_text(encoding="utf-8"), self.parameters, code], sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Progress:
    """Reported while a notebook runs; ``outcome`` is set once it ended."""

    step: Step
    seconds: float
    cells_done: int
    cells: int
    outcome: Outcome | None = None
    resumed: bool = False


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Own ``output`` for the length of a run; raises RunRefused where another run does or it is not writable."""
    lock = filelock.FileLock(output / ".lock")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):  # filelock takes "no permission" for "in use"
            pass
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunRefused(
            f"another run is writing to {output}; wait for it, or choose another folder with --output"
        ) from None
    except OSError as error:
        raise RunRefused(f"cannot write to output folder {output}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


class Run:
    """State of one run in its output folder: ``run.json`` says which notebooks ended, and how."""

    def __init__(self, output: Path, profile: str, code: str, *, resume: bool) -> None:
        self.output = output
        self.code = code
        self.path = output / "run.json"
        self.state: dict[str, Any] = {"run": uuid.uuid4().hex[:12], "profile": profile, "notebooks": {}}
        if resume:
            self.state = self._earlier(profile) or self.state

    @property
    def id(self) -> str:
        """Stored with every measurement of this run."""
        return self.state["run"]

    def finished(self, step: Step) -> Outcome | None:
        """How ``step`` went, where this very step already ended well."""
        entry = self.state["notebooks"].get(step.notebook.name)
        if entry is None or entry["key"] != step.key(self.code) or entry["outcome"]["status"] != "ok":
            return None
        return Outcome(**entry["outcome"])

    def execute(
        self, step: Step, *, cell_timeout: int, notebook_timeout: int, report: Callable[[Progress], None]
    ) -> Outcome:
        """Run one notebook in a child process, watch it, and note how it ended."""
        executed = self.output / "executed" / f"{step.notebook.name}.ipynb"
        executed.parent.mkdir(exist_ok=True)
        executed.unlink(missing_ok=True)
        cells = len(code_cells(step.notebook.path)) + 1  # papermill adds one with the parameters
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(
                source=str(step.notebook.path),
                executed=str(executed),
                result=str(Path(scratch) / "result.json"),
                parameters=step.parameters,
                cell_timeout=cell_timeout,
            )
            child = _start(job, Path(scratch), self.id)
            try:
                while child.poll() is None:
                    seconds = time.monotonic() - started
                    if seconds > notebook_timeout:
                        _end(child)
                        break
                    report(Progress(step, seconds, _cells_done(executed), cells))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_POLL)
            except BaseException:
                _end(child)
                raise
            outcome = self._outcome(job, child, time.monotonic() - started, notebook_timeout)
        self._note(step, outcome)
        report(Progress(step, outcome.seconds, _cells_done(executed), cells, outcome))
        return outcome

    def _outcome(self, job: Job, child: subprocess.Popen, seconds: float, limit: int) -> Outcome:
        try:
            return Outcome(**json.loads(Path(job.result).read_text()))
        except FileNotFoundError:
            pass
        if seconds > limit:
            return Outcome("timeout", round(seconds, 2), error=f"the notebook ran longer than {limit} s")
        errors = (Path(job.result).parent / "stderr").read_text(errors="replace").strip()
        return Outcome("crashed", round(seconds, 2), error=errors[-2000:] or f"exit status {child.returncode}")

    def _note(self, step: Step, outcome: Outcome) -> None:
        entry = {"key": step.key(self.code), "outcome": asdict(outcome)}
        self.state["notebooks"][step.notebook.name] = entry
        write_text(self.path, json.dumps(self.state, indent=1) + "\n")

    def _earlier(self, profile: str) -> dict[str, Any] | None:
        try:
            state = json.loads(self.path.read_text())
            return state if state["profile"] == profile and isinstance(state["notebooks"], dict) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunRefused(f"cannot resume: {self.path} is damaged ({error}); run again without --resume") from error


def code_digest(root: Path) -> str:
    """Identity of the package's code: a run resumes only what the same code did."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "diffkv_repro").rglob("*.py"), *(root / "kernels").rglob("*.py")]):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _start(job: Job, scratch: Path, run: str) -> subprocess.Popen:
    described = scratch / "job.json"
    described.write_text(json.dumps(asdict(job)))
    environment = os.environ | {"DIFFKV_REPRO_RUN": run, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with (scratch / "stderr").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "diffkv_repro.study.execute", str(described)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )


def _end(child: subprocess.Popen) -> None:
    """End ``child`` and the kernel it started (which lives in a session of its own)."""
    try:
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _cells_done(executed: Path) -> int:
    """Cells that ended in the copy papermill is writing; 0 while it is being replaced."""
    try:
        cells = code_cells(executed)
    except (OSError, NotebookError):
        return 0
    return sum(cell["metadata"].get("papermill", {}).get("status") == "completed" for cell in cells)
