"""Timing by pairs, and the peak of this process's memory."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of a call and of its baseline, taken in turn so that a drifting machine slows both alike."""

    call: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Call over baseline, pair by pair."""
        return [a / b for a, b in zip(self.call, self.baseline, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        return min(self.ratios), max(self.ratios)


def time_pairs(call: Callable[[], object], baseline: Callable[[], object], repeats: int) -> PairedTimes:
    """Time ``call`` and ``baseline`` in turn, ``repeats`` times, after one uncounted pair; CUDA is synchronised."""
    times = [(_seconds(baseline), _seconds(call)) for _ in range(repeats + 1)][1:]
    return PairedTimes(call=tuple(b for _, b in times), baseline=tuple(a for a, _ in times))


def _seconds(call: Callable[[], object]) -> float:
    _synchronise()
    started = time.perf_counter()
    call()
    _synchronise()
    return time.perf_counter() - started


def _synchronise() -> None:
    import torch  # heavy, and this module is on the ground floor

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class PeakMemory:
    """Filled in by :func:`peak_memory`: bytes in use before, and at the highest point."""

    before: int = 0
    peak: int = 0

    @property
    def growth(self) -> int:
        """Bytes above what was in use before."""
        return self.peak - self.before


@contextmanager
def peak_memory(device: str = "cpu") -> Iterator[PeakMemory]:
    """Watch memory during the block: CUDA's allocator for a CUDA ``device``, else the resident set, sampled.

    Pages of mapped files do not count: how many of a model's weights have been touched yet is no cost of the
    block's own.
    """
    seen = PeakMemory()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seen.before = torch.cuda.memory_allocated()
        yield seen
        torch.cuda.synchronize()
        seen.peak = torch.cuda.max_memory_allocated()
        return
    done = threading.Event()
    seen.before = seen.peak = _anonymous_bytes()

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            seen.peak = max(seen.peak, _anonymous_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield seen
    finally:
        done.set()
        sampler.join()
        seen.peak = max(seen.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)
