"""What notebook 12 counts: the theorems against direct comparison, the candidate set under drift, the controller."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.latency import (
    NO_COMPRESSION,
    Envelope,
    MeasuredProfile,
    ServiceContext,
    transfer_seconds,
)

GBPS = 1e9 / 8  # bytes per second
_EQUAL = 1e-12


def of_parts(name: str, ratio: float, parts: Mapping[str, Sequence[float]], codecs: Sequence[str]) -> MeasuredProfile:
    """A profile of components in turn: ``parts`` are GB/s of encoding and decoding by component.

    Those named in ``codecs`` are given per byte of 8-bit codes, of which a raw 16-bit byte makes half of one.
    """
    share = {part: 0.5 if part in codecs else 1.0 for part in parts}
    encode, decode = (1e9 / sum(share[part] / speeds[way] for part, speeds in parts.items()) for way in (0, 1))
    return MeasuredProfile(name, ratio, encode, decode)


def random_profiles(generator: np.random.Generator, count: int) -> list[MeasuredProfile]:
    """``count`` profiles with ratios of 1.05 to 20 and speeds of 0.1 to 100 GB/s, even on a logarithmic scale.

    Some of them are twins of others in ratio or speed, so that ties are among them.
    """
    ratios = np.exp(generator.uniform(math.log(1.05), math.log(20), count))
    speeds = np.exp(generator.uniform(math.log(1e8), math.log(1e11), (count, 2)))
    for values in (ratios, speeds):
        twins = generator.random(count) < 0.2
        values[twins] = values[generator.integers(count, size=int(twins.sum()))]
    return [MeasuredProfile(f"p{i}", float(ratios[i]), *map(float, speeds[i])) for i in range(count)]


def threshold_disagreements(trials: int, seed: int) -> int:
    """Theorem 6.1: of ``trials`` random profiles, sizes and bandwidths, those where T_p < T_0 is not B < B*."""
    generator = np.random.default_rng(seed)
    wrong = 0
    for profile in random_profiles(generator, trials):
        raw_bytes, bandwidth = np.exp(generator.uniform(np.log([1e3, 1e5]), np.log([1e12, 1e12])))
        context = ServiceContext("any", float(raw_bytes), float(bandwidth))
        pays = transfer_seconds(profile, context) < transfer_seconds(NO_COMPRESSION, context)
        wrong += pays != bool(bandwidth < profile.break_even)
    return wrong


def equal_time_bandwidth(profile: MeasuredProfile, raw_bytes: float) -> float:
    """Where ``profile`` and no compression take equally long for so many bytes, by bisection on equation 1 alone."""
    low, high = 1.0, 1e18
    while high / low > 1 + 1e-14:
        middle = math.sqrt(low * high)
        context = ServiceContext("any", raw_bytes, middle)
        if transfer_seconds(profile, context) < transfer_seconds(NO_COMPRESSION, context):
            low = middle
        else:
            high = middle
        if middle in (low, high) and math.nextafter(low, high) >= high:
            break
    return low


def envelope_disagreements(sets: int, bandwidths: int, seed: int) -> tuple[int, float]:
    """Theorem 6.2 over random sets of 1 to 40 profiles.

    How often the look-up is slower than the best of all, and the share of the sets whose envelope begins with no
    compression above all thresholds and ends with the largest ratio as bandwidth goes to zero.
    """
    generator = np.random.default_rng(seed)
    wrong = ends = 0
    for _ in range(sets):
        profiles = random_profiles(generator, int(generator.integers(1, 41)))
        lines, envelope = [NO_COMPRESSION, *profiles], Envelope(profiles)
        for bandwidth in np.exp(generator.uniform(math.log(1e5), math.log(1e13), bandwidths)):
            best = min(line.seconds_per_byte(bandwidth) for line in lines)
            wrong += bool(envelope.best(bandwidth).seconds_per_byte(bandwidth) > best * (1 + _EQUAL))
        above = 1.001 * max(profile.break_even for profile in profiles)
        largest = max(profile.ratio for profile in profiles)
        ends += envelope.best(above) is NO_COMPRESSION and envelope.best(1e-3).ratio == largest
    return wrong, ends / sets


def break_evens_on_envelope(profiles: Sequence[MeasuredProfile]) -> int:
    """How many of the profiles' own break-even bandwidths are also breakpoints of the envelope."""
    edges = Envelope(profiles).bandwidths
    return sum(any(math.isclose(profile.break_even, edge, rel_tol=1e-9) for edge in edges) for profile in profiles)


def share_in_candidates(
    profiles: Sequence[MeasuredProfile], drift: float, trials: int, seed: int, *, reach: int = 1, fastest: int = 0,
    within: float = 0.0,
) -> float:  # fmt: skip
    """How often the truly fastest profile, or one ``within`` that share of its time, is among the candidates.

    Candidates are the envelope's best and ``reach`` neighbours a side, or the ``fastest`` by the model where given.
    The drift multiplies each profile's codec time by a log-normal factor of its own, of standard deviation ``drift``.
    Bandwidths are even on a logarithmic scale, from a third of the lowest breakpoint to three times the highest.
    """
    generator = np.random.default_rng(seed)
    envelope = Envelope(profiles)
    lines = [NO_COMPRESSION, *profiles]
    place = {line.name: index for index, line in enumerate(lines)}
    low, high = envelope.bandwidths[-1] / 3, envelope.bandwidths[0] * 3
    found = 0
    for _ in range(trials):
        bandwidth = math.exp(generator.uniform(math.log(low), math.log(high)))
        factors = np.exp(generator.normal(0, drift, len(lines)))
        true = [line.codec_seconds * factor + 1 / (bandwidth * line.ratio)
                for line, factor in zip(lines, factors, strict=True)]  # fmt: skip
        near = envelope.fastest(bandwidth, fastest) if fastest else envelope.candidates(bandwidth, reach)
        found += min(true[place[line.name]] for line in near) <= min(true) * (1 + within)
    return found / trials


def decisions_until_left(
    profiles: Sequence[MeasuredProfile], bandwidth: float, *, factor: float = 4.0, settled: int = 20,
    settings: ControllerSettings | None = None, most: int = 1000,
) -> int:  # fmt: skip
    """Uses of the favourite at ``bandwidth``, from the moment on that it takes ``factor`` times as long, until left.

    ``settled`` requests go as predicted before. Exploring is off unless ``settings`` say otherwise: it would leave
    early by chance. At most ``most``.
    """
    controller = Controller(profiles, settings or ControllerSettings(epsilon=0.0))
    context = ServiceContext("any", 1e8, bandwidth)
    favourite = Envelope(profiles).best(bandwidth)
    uses = 0
    for step in range(settled + most):
        decision = controller.decide(context)
        if step >= settled and not decision.explored and decision.profile is not favourite:
            break
        slow = factor if step >= settled and decision.profile is favourite else 1.0
        uses += step >= settled and decision.profile is favourite
        controller.observe(decision, slow * transfer_seconds(decision.profile, context), bandwidth=bandwidth)
    return uses


def decision_seconds(profiles: int, decisions: int, seed: int) -> tuple[float, float]:
    """Median and 99.9th percentile of the processor seconds of a decision among so many random profiles, warm."""
    generator = np.random.default_rng(seed)
    controller = Controller(random_profiles(generator, profiles))
    times = []
    for bandwidth in np.exp(generator.uniform(math.log(1e6), math.log(1e12), decisions + decisions // 10)):
        context = ServiceContext("any", 1e8, float(bandwidth), slo=10.0)
        started = time.thread_time()
        decision = controller.decide(context)
        times.append(time.thread_time() - started)
        controller.observe(decision, 1.1 * transfer_seconds(decision.profile, context), bandwidth=bandwidth)
    warm = times[decisions // 10 :]
    return float(np.median(warm)), float(np.quantile(warm, 0.999))


def middles(profiles: Sequence[MeasuredProfile]) -> list[float]:
    """A bandwidth inside each interval of the envelope in which some profile, not the plain cache, is best."""
    edges = Envelope(profiles).bandwidths
    inner = [math.sqrt(a * b) for a, b in pairwise(edges)]
    return [*inner, edges[-1] / 3]


def random_windows(duration: float, seed: int, *, count: int = 2) -> list[tuple[float, float, float]]:
    """Start, end and slow-down of ``count`` spells of contention within ``duration`` seconds.

    A spell lasts 10 to 25 % of the duration and slows codecs 2 to 4 times.
    """
    generator = random.Random(seed)
    spells = []
    for _ in range(count):
        length = duration * generator.uniform(0.10, 0.25)
        start = generator.uniform(0, duration - length)
        spells.append((start, start + length, generator.uniform(2, 4)))
    return spells
