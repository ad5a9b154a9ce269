"""Timing by pairs, and the peak of this process's memory."""

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    """Watch memory during the block: CUDA's allocator for a CUDA ``device``, else the process's resident set.

    Linux itself records the peak of the resident set; elsewhere it is sampled, and a short peak can be missed.
    Pages of mapped files count as they are first touched: touch a model's weights before the block.
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
    give_back_freed()
    if _reset_high_water_mark():
        seen.before = _status_bytes("VmRSS")
        yield seen
        seen.peak = _status_bytes("VmHWM")
        return
    done = threading.Event()
    seen.before = seen.peak = _resident_bytes()

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            seen.peak = max(seen.peak, _resident_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield seen
    finally:
        done.set()
        sampler.join()
        seen.peak = max(seen.peak, _resident_bytes())


def give_back_freed() -> None:
    """Let glibc return what it keeps of freed memory, which can be gigabytes after many tensors of many sizes.

    A measurement of memory would otherwise use that first, and seem smaller by it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def _reset_high_water_mark() -> bool:
    """Let Linux begin its record of the peak anew; False where it does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
