"""Who measured what, where, with which versions and seed."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "numpy", "triton", "lm-eval", "diffkv-repro")


@dataclass(frozen=True)
class Provenance:
    """Everything needed to judge or repeat a measurement.

    ``config`` holds what the numbers depend on: sizes, model, texts and their fingerprints. ``commit`` ends in
    ``+`` when the checkout had uncommitted changes outside ``figures/``, which a run itself rewrites.
    """

    device: str
    date: str
    commit: str
    python: str
    versions: Mapping[str, str]
    seed: int | None = None
    profile: str | None = None
    run: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for a figure's foot."""
        commit = re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", self.commit)
        parts = [self.device, self.date[:10], f"commit {commit}"]
        if self.profile:
            parts.append(f"profile {self.profile}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return " · ".join(parts)


def capture(
    *, root: Path, seed: int | None = None, profile: str | None = None, config: Mapping[str, Any] | None = None
) -> Provenance:
    """Provenance of the measurement being made now in the checkout ``root``."""
    return Provenance(
        device=device_name(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit_of(root),
        python=platform.python_version(),
        versions=package_versions(),
        seed=seed,
        profile=profile,
        run=os.environ.get("DIFFKV_REPRO_RUN"),
        config=dict(config or {}),
    )


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def device_name() -> str:
    """The accelerator if there is one, else the CPU and its usable cores."""
    import torch  # heavy, and this module is on the ground floor

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return cpu_name()


@cache
def cpu_name() -> str:
    """The CPU and its usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()} ({cores} cores)"


def _cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1).strip() if match else (platform.processor() or platform.machine())


def commit_of(root: Path) -> str:
    """Short commit of the checkout, with a ``+`` for uncommitted changes; ``unknown`` outside git.

    ``DIFFKV_REPRO_COMMIT`` names it where the checkout travels without its history (a container, a GPU machine).
    """
    named = os.environ.get("DIFFKV_REPRO_COMMIT")
    if named:
        return named
    try:
        head = _git(root, "rev-parse", "--short=10", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--", ".", ":!figures") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
