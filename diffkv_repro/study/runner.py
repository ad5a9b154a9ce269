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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import psutil

from diffkv_repro.core.files import write_text
from diffkv_repro.core.provenance import device_name, package_versions
from diffkv_repro.study.execute import Job, Outcome
from diffkv_repro.study.notebooks import Notebook, NotebookError, code_cells
from diffkv_repro.study.records import RecordError, read_record

_GRACE = 10.0
_POLL = 0.5
CELL_TIMEOUT = {"smoke": 300, "cpu": 1800, "gpu": 1800, "full": 6 * 3600}
NOTEBOOK_TIMEOUT = {"smoke": 600, "cpu": 3600, "gpu": 3600, "full": 48 * 3600}


class RunRefused(RuntimeError):
    """A run that must not start: the output folder is in use, or cannot be written."""


@dataclass(frozen=True)
class Step:
    """A notebook to run, everything it is given, and the figures it is to record."""

    notebook: Notebook
    parameters: dict[str, Any]
    figures: tuple[str, ...] = ()

    def key(self, surroundings: str) -> str:
        """Identity of what this step would do: its source, its parameters, the files they name, the rest."""
        files = {name: _stamp(Path(value)) for name, value in self.parameters.items() if _is_path(value)}
        what = [self.notebook.path.read_text(encoding="utf-8"), self.parameters, files, surroundings]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_absolute() and Path(value).exists()


def _stamp(path: Path) -> list[Any]:
    """Size and time of a file, or of all files of a folder; the output folder itself is no input."""
    if (path / "run.json").exists():
        return []
    files = [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


@dataclass(frozen=True)
class Progress:
    """Reported while a notebook runs."""

    step: Step
    cells_done: int
    cells: int


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
    """State of one run in its output folder: ``run.json`` says which notebooks ended, and how.

    ``surroundings`` identifies what all steps share: the package's code, library versions, the device.
    """

    def __init__(self, output: Path, profile: str, surroundings: str, *, resume: bool) -> None:
        self.output = output
        self.surroundings = surroundings
        self.path = output / "run.json"
        fresh = {"run": uuid.uuid4().hex[:12], "profile": profile, "notebooks": {}}
        self.state: dict[str, Any] = (self._earlier(profile) if resume else None) or fresh
        self._save()

    @property
    def id(self) -> str:
        """Stored with every measurement of this run."""
        return self.state["run"]

    def finished(self, step: Step) -> Outcome | None:
        """How ``step`` went, where this very step already ended well and what it recorded is still there."""
        entry = self.state["notebooks"].get(step.notebook.name)
        if entry is None or entry["key"] != step.key(self.surroundings) or entry["outcome"]["status"] != "ok":
            return None
        for figure in step.figures:
            try:
                record = read_record(self.output, figure)
            except RecordError:
                return None
            if record is None or record.provenance.get("run") != self.id:
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
        peak = 0
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
                    if time.monotonic() - started > notebook_timeout:
                        _end(child)
                        break
                    peak = max(peak, _largest(child))
                    report(Progress(step, _cells_done(executed), cells))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_POLL)
            except BaseException:
                _end(child)
                raise
            outcome = self._outcome(job, child, time.monotonic() - started, notebook_timeout)
        outcome = replace(outcome, peak_bytes=max(peak, outcome.peak_bytes))
        if outcome.status != "ok" and not outcome.cell:
            outcome = replace(outcome, **_unfinished_cell(executed))
        self._note(step, outcome)
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
        entry = {"key": step.key(self.surroundings), "outcome": asdict(outcome)}
        self.state["notebooks"][step.notebook.name] = entry
        self._save()

    def _save(self) -> None:
        write_text(self.path, json.dumps(self.state, indent=1) + "\n")

    def _earlier(self, profile: str) -> dict[str, Any] | None:
        try:
            state = json.loads(self.path.read_text())
            for entry in state["notebooks"].values():
                Outcome(**entry["outcome"])
                entry["key"]
            return state if (state["profile"], bool(state["run"])) == (profile, True) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunRefused(
                f"cannot resume: {self.path} is damaged ({error!r}); run again without --resume"
            ) from error


def surroundings() -> str:
    """What every step depends on: the package's code, library versions and the device."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(json.dumps([package_versions(), device_name()], sort_keys=True).encode())
    for path in sorted([*package.rglob("*.py"), *(package.parent / "kernels").rglob("*.py")]):
        digest.update(str(path.relative_to(package.parent)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does, so that no notebook goes on without it.

    SIGINT too: a shell starts its background jobs with that one ignored.
    """

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, scratch: Path, run: str) -> subprocess.Popen:
    described = scratch / "job.json"
    described.write_text(json.dumps(asdict(job)))
    # Threads that wait for work are to sleep: spinning ones slow each other down on a busy machine.
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment = quiet | {"DIFFKV_REPRO_RUN": run, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with (scratch / "stderr").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "diffkv_repro.study.execute", str(described)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )


def _family(child: subprocess.Popen) -> list[psutil.Process]:
    """``child`` and the kernel it started, which lives in a session of its own."""
    try:
        process = psutil.Process(child.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(child: subprocess.Popen) -> None:
    family = _family(child)
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def _largest(child: subprocess.Popen) -> int:
    """Bytes of the largest process of the family now."""
    sizes = [0]
    for process in _family(child):
        with contextlib.suppress(psutil.Error):
            sizes.append(process.memory_info().rss)
    return max(sizes)


def _unfinished_cell(executed: Path) -> dict[str, Any]:
    """The cell a run that ended early was in."""
    try:
        cells = code_cells(executed)
    except (OSError, NotebookError):
        return {}
    for number, cell in enumerate(cells):
        if not _replied(cell):
            return {"cell_number": number, "cell": "".join(cell["source"])}
    return {}


def _cells_done(executed: Path) -> int:
    """Cells that ended in the copy papermill is writing; 0 while it is being replaced."""
    try:
        cells = code_cells(executed)
    except (OSError, NotebookError):
        return 0
    return sum(map(_replied, cells))


def _replied(cell: dict[str, Any]) -> bool:
    """Whether the kernel finished ``cell``; papermill calls one that ran out of time completed too."""
    return "shell.execute_reply" in cell["metadata"].get("execution", {})
