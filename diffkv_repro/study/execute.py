"""Run one notebook with papermill in a process of its own: ``python -m diffkv_repro.study.execute JOB``.

JOB is a JSON file with the keys of :class:`Job`. What happened goes into its ``result`` file; the executed
notebook is written cell by cell, so a run that dies leaves what it had.
"""

import ctypes
import json
import logging
import re
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffkv_repro.core.files import write_text

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Job:
    """A notebook to run, where its copy goes, and its limits in seconds."""

    source: str
    executed: str
    result: str
    parameters: dict[str, Any]
    cell_timeout: int
    kernel: str = "python3"


@dataclass(frozen=True)
class Outcome:
    """``status`` is ``ok``, ``failed``, ``timeout`` or ``crashed``; ``cell`` quotes where it stopped otherwise."""

    status: str
    seconds: float = 0.0
    peak_bytes: int = 0
    cell_number: int | None = None
    cell: str = ""
    error: str = ""

    @property
    def peak_gib(self) -> float:
        """Peak memory of the kernel or papermill, whichever was larger."""
        return self.peak_bytes / 2**30


def run(job: Job) -> Outcome:
    """Execute ``job`` and say how it went; exceptions of the notebook become part of the outcome."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    started = time.monotonic()

    def ended(status: str, **details: Any) -> Outcome:
        return Outcome(status, round(time.monotonic() - started, 2), _peak_bytes(), **details)

    try:
        papermill.execute_notebook(
            job.source,
            job.executed,
            parameters=job.parameters,
            kernel_name=job.kernel,
            progress_bar=False,
            execution_timeout=job.cell_timeout,
            cwd=str(Path(job.source).parent),
        )
    except papermill.PapermillExecutionError as error:
        message = f"{error.ename}: {error.evalue}"
        return ended("failed", cell_number=error.cell_index, cell=error.source, error=_ANSI.sub("", message))
    except CellTimeoutError as error:
        return ended("timeout", error=f"a cell ran longer than {job.cell_timeout} s: {str(error).splitlines()[0]}")
    except DeadKernelError as error:
        return ended("crashed", error=f"the kernel died ({error}); out of memory?")
    except Exception as error:  # whatever else went wrong belongs to this notebook, not to the whole run
        return ended("crashed", error=f"{type(error).__name__}: {error}")
    return ended("ok")


def _peak_bytes() -> int:
    """Largest resident set of this process or of any child that ended (the kernel)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _end_with_parent() -> None:
    """On Linux, be interrupted when the runner dies without a word (SIGKILL); papermill then ends its kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))


def main(path: str) -> int:
    """Entry point of the child process."""
    logging.getLogger("papermill").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the runner is a background job
    _end_with_parent()
    job = Job(**json.loads(Path(path).read_text()))
    outcome = run(job)
    write_text(Path(job.result), json.dumps(asdict(outcome)))
    return 0 if outcome.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
