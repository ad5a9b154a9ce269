"""A bandwidth trace replayed through the controller and what it is compared with, by equation 1 alone.

A simulation: no byte is sent. One request at a time, each at the bandwidth and the slow-down of its arrival.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.goodput import GoodputEstimator
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile, ServiceContext
from diffkv_repro.kvserve.traces import Trace

ARMS = ("full", "no bandit", "no model", "best static", "no compression", "oracle")


@dataclass(frozen=True)
class Contention:
    """From ``start`` to ``end`` seconds the codecs of ``profiles`` (all, if empty) take ``slowdown`` times as long."""

    start: float
    end: float
    slowdown: float
    profiles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.start < self.end:
            raise ValueError(f"contention lasts from {self.start} to {self.end} s; it must end after it starts")
        if not self.slowdown > 0:
            raise ValueError(f"slowdown is {self.slowdown}; it must be above 0")

    def factor(self, profile: MeasuredProfile, second: float) -> float:
        """What it multiplies the codec time of ``profile`` with at ``second``."""
        touched = not self.profiles or profile.name in self.profiles
        return self.slowdown if touched and self.start <= second < self.end else 1.0


@dataclass(frozen=True)
class Load:
    """Requests that come every ``every`` seconds.

    ``raw_bytes`` is the median size; sizes and times scatter log-normally by ``size_spread`` and ``noise`` (standard
    deviations of the logarithm). A request's noise is the same whatever its profile.
    """

    raw_bytes: float
    every: float = 0.606
    size_spread: float = 0.0
    noise: float = 0.0
    workload: str = "any"
    slo: float = float("inf")
    min_quality: float = 0.0
    model_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise ValueError(f"every is {self.every} s; it must be above 0")
        for name in ("size_spread", "noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        self.context(self.raw_bytes, None)

    def context(self, raw_bytes: float, bandwidth: float | None) -> ServiceContext:
        """A request of so many bytes at that bandwidth."""
        return ServiceContext(
            self.workload, raw_bytes, bandwidth, self.slo, self.min_quality, self.model_seconds
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One arm over a trace: seconds of each request, the profile each had, and what it lost to the oracle so far."""

    arm: str
    arrivals: np.ndarray
    seconds: np.ndarray
    profiles: tuple[str, ...]
    regret: np.ndarray

    @property
    def mean(self) -> float:
        """Mean seconds of a request."""
        return float(self.seconds.mean())

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the requests stay within."""
        return float(np.quantile(self.seconds, share))

    @property
    def relative_regret(self) -> float:
        """Seconds lost to the oracle over all requests, as a share of the oracle's own."""
        return float(self.regret[-1] / (self.seconds.sum() - self.regret[-1]))


@dataclass(frozen=True)
class _Truth:
    """What every profile would have taken: ``seconds`` and ``link`` (sending alone) [requests, profiles]."""

    profiles: tuple[MeasuredProfile, ...]
    arrivals: np.ndarray
    sizes: np.ndarray
    seconds: np.ndarray
    link: np.ndarray


def replay(
    profiles: Iterable[MeasuredProfile], trace: Trace, load: Load, *, contention: Sequence[Contention] = (),
    arms: Sequence[str] = ARMS, settings: ControllerSettings | None = None, half_life: float = 1.0, seed: int = 0,
) -> dict[str, Run]:  # fmt: skip
    """Every arm over the same requests of ``trace``, by name.

    - ``full``: the controller, with bandwidth from a goodput estimator of that ``half_life``;
    - ``no bandit``: the same without learning and exploring: the envelope's best at the estimated bandwidth;
    - ``no model``: an epsilon-greedy bandit over all profiles that knows neither bandwidth nor the model;
    - ``best static``: the one profile, no compression among them, whose mean over the trace is least, in hindsight;
    - ``no compression``; ``oracle``: the fastest profile of each request, contention and noise known.

    Deterministic by ``seed``. Raises ValueError for an unknown arm and for a trace that ends where it begins.
    """
    unknown = sorted(set(arms) - set(ARMS))
    if unknown:
        raise ValueError(f"unknown arm {', '.join(unknown)}; allowed are {', '.join(ARMS)}")
    given = dataclasses.replace(settings or ControllerSettings(), seed=seed)
    plain = dataclasses.replace(given, alpha=0.0, epsilon=0.0)
    truth = _truth(tuple(profiles), trace, load, contention, seed)
    choose: dict[str, Callable[[], np.ndarray]] = {
        "full": lambda: _controlled(truth, load, given, half_life),
        "no bandit": lambda: _controlled(truth, load, plain, half_life),
        "no model": lambda: _model_free(truth, given),
        "best static": lambda: np.full(len(truth.sizes), truth.seconds.mean(axis=0).argmin()),
        "no compression": lambda: np.zeros(len(truth.sizes), dtype=int),
        "oracle": lambda: truth.seconds.argmin(axis=1),
    }
    return {arm: _run(arm, truth, choose[arm]()) for arm in arms}


def _truth(
    profiles: tuple[MeasuredProfile, ...], trace: Trace, load: Load, contention: Sequence[Contention], seed: int
) -> _Truth:
    good = [profile for profile in profiles if profile.quality_of(load.workload) >= load.min_quality]
    lines = (NO_COMPRESSION, *good)
    arrivals = np.arange(0.0, trace.duration, load.every)
    if not len(arrivals):
        raise ValueError(f"the trace lasts {trace.duration} s; no request comes in that time")
    generator = np.random.default_rng(seed)
    sizes = load.raw_bytes * np.exp(generator.normal(0, load.size_spread, len(arrivals)))
    noise = np.exp(generator.normal(0, load.noise, len(arrivals)))
    bandwidths = np.array([trace.at(second) for second in arrivals])
    slow = np.array([[_slowdown(contention, line, second) for line in lines] for second in arrivals])
    per_byte = 1 / (bandwidths[:, None] * np.array([line.ratio for line in lines]))
    link = sizes[:, None] * noise[:, None] * per_byte
    codec = sizes[:, None] * noise[:, None] * slow * np.array([line.codec_seconds for line in lines])
    return _Truth(lines, arrivals, sizes, load.model_seconds + codec + link, link)


def _slowdown(contention: Sequence[Contention], profile: MeasuredProfile, second: float) -> float:
    return float(np.prod([one.factor(profile, second) for one in contention]))


def _controlled(truth: _Truth, load: Load, settings: ControllerSettings, half_life: float) -> np.ndarray:
    clock = [0.0]
    link = GoodputEstimator(half_life=half_life, least_bytes=1, clock=lambda: clock[0])
    controller = Controller(truth.profiles[1:], settings)
    column = {profile.name: place for place, profile in enumerate(truth.profiles)}
    chosen = []
    for row, (arrival, size) in enumerate(zip(truth.arrivals, truth.sizes, strict=True)):
        clock[0] = arrival
        decision = controller.decide(load.context(size, link.bandwidth))
        place = column[decision.profile.name]
        chosen.append(place)
        sent, on_link = size / decision.profile.ratio, truth.link[row, place]
        link.acknowledge(sent, on_link)
        controller.observe(decision, truth.seconds[row, place], bandwidth=sent / on_link)
    return np.array(chosen)


def _model_free(truth: _Truth, settings: ControllerSettings) -> np.ndarray:
    generator = np.random.default_rng(settings.seed)
    count = len(truth.profiles)
    means = np.zeros(count)  # seconds a byte; the untried, at 0, come first
    uses = np.zeros(count, dtype=int)
    chosen = []
    for row, size in enumerate(truth.sizes):
        explores, random_place = generator.random() < settings.epsilon, int(generator.integers(count))
        place = random_place if explores else int(means.argmin())
        chosen.append(place)
        uses[place] += 1
        means[place] += max(settings.alpha, 1 / uses[place]) * (truth.seconds[row, place] / size - means[place])
    return np.array(chosen)


def _run(arm: str, truth: _Truth, chosen: np.ndarray) -> Run:
    seconds = truth.seconds[np.arange(len(chosen)), chosen]
    regret = np.cumsum(seconds - truth.seconds.min(axis=1))
    return Run(arm, truth.arrivals, seconds, tuple(truth.profiles[place].name for place in chosen), regret)
