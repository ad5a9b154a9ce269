"""Bandwidth over time, for the simulator: bytes per second at any second of a trace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trace:
    """Bandwidth at increasing ``seconds`` from 0 on; between two points linear, or with ``hold`` that of the earlier.

    Raises ValueError for points that are not in order, and for a bandwidth that is not above 0.
    """

    seconds: tuple[float, ...]
    bandwidths: tuple[float, ...]
    hold: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", tuple(map(float, self.seconds)))
        object.__setattr__(self, "bandwidths", tuple(map(float, self.bandwidths)))
        if not self.seconds or len(self.seconds) != len(self.bandwidths):
            raise ValueError(f"{len(self.seconds)} seconds have {len(self.bandwidths)} bandwidths; each needs one")
        if self.seconds[0] != 0 or not all(np.diff(self.seconds) > 0):
            raise ValueError(f"seconds are {self.seconds}; they must start at 0 and increase")
        for bandwidth in self.bandwidths:
            if not (math.isfinite(bandwidth) and bandwidth > 0):
                raise ValueError(f"a bandwidth is {bandwidth} bytes/s; it must be finite and above 0")

    @property
    def duration(self) -> float:
        """Second of the last point."""
        return self.seconds[-1]

    def at(self, second: float) -> float:
        """Bandwidth at ``second``; after the last point, that of the last."""
        if self.hold:
            return self.bandwidths[max(0, int(np.searchsorted(self.seconds, second, side="right")) - 1)]
        return float(np.interp(second, self.seconds, self.bandwidths))

    @property
    def middle(self) -> float:
        """Geometric mean of the bandwidths."""
        return math.exp(sum(map(math.log, self.bandwidths)) / len(self.bandwidths))

    def scaled(self, factor: float) -> "Trace":
        """The same course with every bandwidth times ``factor``."""
        return Trace(self.seconds, tuple(factor * bandwidth for bandwidth in self.bandwidths), self.hold)


def constant(bandwidth: float, duration: float) -> Trace:
    """The same bandwidth throughout."""
    return Trace((0.0, duration), (bandwidth, bandwidth))


def step(bandwidths: Sequence[float], each: float) -> Trace:
    """One bandwidth after the other, each for ``each`` seconds."""
    return Trace(tuple(each * i for i in range(len(bandwidths) + 1)), (*bandwidths, bandwidths[-1]), hold=True)


def sine(low: float, high: float, period: float, duration: float) -> Trace:
    """Up and down between ``low`` and ``high``, even on a logarithmic scale, 64 points a period."""
    seconds = np.linspace(0, duration, max(2, round(64 * duration / period) + 1))
    middle, swing = math.log(low * high) / 2, math.log(high / low) / 2
    return Trace(tuple(seconds), tuple(np.exp(middle + swing * np.sin(2 * np.pi * seconds / period))))


def random_walk(
    low: float, high: float, duration: float, *, every: float = 1.0, spread: float = 0.2, seed: int = 0
) -> Trace:
    """A walk in log bandwidth from the middle of ``low`` and ``high``, thrown back at both.

    A step every ``every`` seconds, with a standard deviation of ``spread`` (0.2: about 20 %).
    """
    generator = np.random.default_rng(seed)
    count = round(duration / every)
    span = math.log(high / low)
    walked = span / 2 + np.concatenate([[0.0], np.cumsum(generator.normal(0, spread, count))])
    # Folded like a strip of paper: what passes one end comes back from it.
    folded = span - np.abs(np.mod(walked, 2 * span) - span) if span else np.zeros_like(walked)
    return Trace(tuple(every * i for i in range(count + 1)), tuple(low * np.exp(folded)))
