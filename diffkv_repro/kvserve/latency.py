"""KVServe's latency model: what a profile costs at a bandwidth, when it pays, which is best (sections 5 and 6).

Bytes are bytes of the raw 16-bit KV cache, bandwidths and speeds are bytes per second, times are seconds.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from heapq import nsmallest
from itertools import pairwise

ANY_WORKLOAD = "*"


@dataclass(frozen=True)
class MeasuredProfile:
    """A compression profile as the latency model sees it.

    ``ratio``: raw over sent bytes, below 1 where headers outweigh what is saved. ``encode`` and ``decode``: raw KV
    bytes per second, infinite where there is nothing to do. ``quality`` by workload: score over that of the
    uncompressed cache; the entry ``"*"`` stands for every workload without one of its own.
    """

    name: str
    ratio: float
    encode: float
    decode: float
    quality: Mapping[str, float] = field(default_factory=lambda: {ANY_WORKLOAD: 1.0}, hash=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a profile needs a name; '' is none")
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"ratio of {self.name} is {self.ratio}; it must be finite and above 0")
        for name in ("encode", "decode"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)} bytes/s; it must be above 0")
        for workload, value in self.quality.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"quality of {self.name} on {workload} is {value}; it must be finite, at least 0")
        object.__setattr__(self, "quality", dict(self.quality))

    @classmethod
    def from_speed(
        cls, name: str, ratio: float, speed: float, quality: Mapping[str, float] | None = None
    ) -> "MeasuredProfile":
        """A profile of which only the paper's s is known: encoding and decoding are given half of the time each."""
        return cls(name, ratio, 2 * speed, 2 * speed, {ANY_WORKLOAD: 1.0} if quality is None else quality)

    @cached_property
    def speed(self) -> float:
        """The paper's s: 1/s = 1/encode + 1/decode."""
        return 1 / per_byte if (per_byte := self.codec_seconds) else math.inf

    @cached_property
    def codec_seconds(self) -> float:
        """Seconds of encoding and decoding a raw byte, 1/s."""
        return 1 / self.encode + 1 / self.decode

    @cached_property
    def break_even(self) -> float:
        """Theorem 6.1: the bandwidth B* = (1 - 1/ratio) s below which the profile beats no compression; 0 if never."""
        if self.ratio <= 1:
            return 0.0
        return (1 - 1 / self.ratio) * self.speed

    def seconds_per_byte(self, bandwidth: float) -> float:
        """1/s + x/ratio at x = 1/bandwidth: the line of theorem 6.2."""
        return self.codec_seconds + 1 / (bandwidth * self.ratio)

    def quality_of(self, workload: str) -> float:
        """Quality on ``workload``; 0 for one that was neither measured nor covered by ``"*"``."""
        return self.quality.get(workload, self.quality.get(ANY_WORKLOAD, 0.0))


NO_COMPRESSION = MeasuredProfile("none", 1.0, math.inf, math.inf)


@dataclass(frozen=True)
class ServiceContext:
    """What a request asks for: the paper's c = (w, B, T_SLO, q_min), with its volume V and model time T_model.

    ``bandwidth`` is None where nothing is known about the link. ``slo`` bounds the whole time, model included.
    """

    workload: str
    raw_bytes: float
    bandwidth: float | None
    slo: float = math.inf
    min_quality: float = 0.0
    model_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.raw_bytes) and self.raw_bytes > 0):
            raise ValueError(f"raw_bytes is {self.raw_bytes}; it must be finite and above 0")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth} bytes/s; it must be above 0, or None if not known")
        if not self.slo > 0:
            raise ValueError(f"slo is {self.slo} s; it must be above 0")
        for name in ("min_quality", "model_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")


def transfer_seconds(profile: MeasuredProfile, context: ServiceContext) -> float:
    """Equation 1: T_p = T_model + V/s + V/(B ratio); T_0 is that of ``NO_COMPRESSION``.

    Raises ValueError where the context's bandwidth is not known.
    """
    if context.bandwidth is None:
        raise ValueError("bandwidth is None: equation 1 needs one")
    return context.model_seconds + context.raw_bytes * profile.seconds_per_byte(context.bandwidth)


def feasible(profiles: Iterable[MeasuredProfile], context: ServiceContext) -> list[MeasuredProfile]:
    """Equation 2: those that keep the SLO and the least quality."""
    return [
        profile
        for profile in profiles
        if profile.quality_of(context.workload) >= context.min_quality
        and transfer_seconds(profile, context) <= context.slo
    ]


def fastest(profiles: Iterable[MeasuredProfile], context: ServiceContext) -> MeasuredProfile | None:
    """Equation 3 by trying all: the feasible profile of least T_p, the first of equals; None if none is feasible."""
    return min(feasible(profiles, context), key=lambda profile: transfer_seconds(profile, context), default=None)


class Envelope:
    """Theorem 6.2: over x = 1/bandwidth each profile is a line, and the best one follows their lower envelope.

    ``profiles``: those on the envelope, from the highest bandwidth to the lowest. ``edges``: the x at which each
    gives way to the next, increasing. "No compression" is one of the lines unless ``with_none`` is False. Of profiles
    with the same line only the first stays, "no compression" before all. A look-up takes O(log n). ``lines``: all.
    """

    def __init__(self, profiles: Iterable[MeasuredProfile], *, with_none: bool = True) -> None:
        given = [NO_COMPRESSION] * with_none + list(profiles)
        if not given:
            raise ValueError("an envelope of no profile at all; give at least one, or with_none=True")
        # Exact, so that nearly equal lines can neither be lost nor come in the wrong order.
        lines = sorted(((*_line(profile), place) for place, profile in enumerate(given)))
        hull: list[tuple[Fraction, Fraction, int]] = []
        for line in lines:
            if hull and line[1] >= hull[-1][1]:
                continue  # starts no lower and rises no slower: never the best
            while len(hull) > 1 and _crossing(hull[-1], line) <= _crossing(hull[-2], hull[-1]):
                hull.pop()
            hull.append(line)
        self.lines = tuple(given)
        self.profiles = tuple(given[place] for *_, place in hull)
        self.edges = tuple(float(_crossing(a, b)) for a, b in pairwise(hull))

    @property
    def bandwidths(self) -> tuple[float, ...]:
        """The breakpoints as bandwidths, decreasing."""
        return tuple(1 / edge for edge in self.edges)

    def interval(self, bandwidth: float) -> int:
        """Which of ``profiles`` is best at ``bandwidth``. Raises ValueError for one that is not above 0."""
        if not bandwidth > 0:
            raise ValueError(f"bandwidth is {bandwidth} bytes/s; it must be above 0")
        return bisect_right(self.edges, 1 / bandwidth)

    def best(self, bandwidth: float) -> MeasuredProfile:
        """The fastest profile at ``bandwidth``."""
        return self.profiles[self.interval(bandwidth)]

    def candidates(self, bandwidth: float, reach: int = 1) -> tuple[MeasuredProfile, ...]:
        """The best and its neighbours up to ``reach`` places away, in the envelope's order (section 6.2)."""
        centre = self.interval(bandwidth)
        return self.profiles[max(0, centre - reach) : centre + reach + 1]

    def fastest(self, bandwidth: float, count: int) -> tuple[MeasuredProfile, ...]:
        """The ``count`` fastest at ``bandwidth``, on the envelope or not, the best first. Takes O(n)."""
        if not bandwidth > 0:
            raise ValueError(f"bandwidth is {bandwidth} bytes/s; it must be above 0")
        return tuple(nsmallest(count, self.lines, key=lambda line: line.seconds_per_byte(bandwidth)))


def _line(profile: MeasuredProfile) -> tuple[Fraction, Fraction]:
    """Intercept 1/s and slope 1/ratio, exact."""
    intercept = sum((1 / Fraction(v) for v in (profile.encode, profile.decode) if v != math.inf), Fraction(0))
    return intercept, 1 / Fraction(profile.ratio)


def _crossing(left: tuple[Fraction, Fraction, int], right: tuple[Fraction, Fraction, int]) -> Fraction:
    """Where ``right``, higher at x = 0 and flatter, comes down to ``left``."""
    return (right[0] - left[0]) / (left[1] - right[1])


def released_choice(profiles: Sequence[MeasuredProfile], bandwidth: float) -> MeasuredProfile:
    """What the released table of intervals returns, whose edges are the break-even bandwidths of theorem 6.1.

    Each interval between two of them, in order, belongs to the profile whose own break-even bounds it from above, so
    that at low bandwidth the one with the *least* break-even is returned, whatever its ratio.
    """
    paying = [profile for profile in profiles if bandwidth < profile.break_even]
    return min(paying, key=lambda profile: profile.break_even, default=NO_COMPRESSION)


@dataclass(frozen=True)
class TableError:
    """How a table compares with the envelope over ``n`` bandwidths: how often slower, and by which factors."""

    n: int
    share_slower: float
    mean_factor: float
    worst_factor: float


def released_error(profiles: Sequence[MeasuredProfile], bandwidths: Sequence[float]) -> TableError:
    """The released table against theorem 6.2; factors are its time over the best, transfers alone."""
    envelope = Envelope(profiles)
    factors = [
        released_choice(profiles, bandwidth).seconds_per_byte(bandwidth)
        / envelope.best(bandwidth).seconds_per_byte(bandwidth)
        for bandwidth in bandwidths
    ]
    slower = sum(factor > 1 + 1e-9 for factor in factors)
    return TableError(len(factors), slower / len(factors), sum(factors) / len(factors), max(factors))
