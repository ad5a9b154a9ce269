"""A replay is deterministic, obeys equation 1, and puts the arms in the order in which they know things."""

import numpy as np
import pytest

from diffkv_repro.kvserve.controller import ControllerSettings
from diffkv_repro.kvserve.latency import NO_COMPRESSION, Envelope, MeasuredProfile
from diffkv_repro.kvserve.simulator import ARMS, Contention, Load, replay
from diffkv_repro.kvserve.traces import Trace, constant, random_walk, sine, step

PROFILES = tuple(
    MeasuredProfile.from_speed(name, ratio, speed)
    for name, ratio, speed in [("2x", 2, 8e9), ("4x", 4, 3e9), ("8x", 8, 1e9)]
)
LOAD = Load(1e8, noise=0.05, size_spread=0.3)
TRACE = sine(5e7, 2e9, 30, 60)


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    first, again, other = (replay(PROFILES, TRACE, LOAD, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(ARMS)
    for arm in ARMS:
        assert np.array_equal(first[arm].seconds, again[arm].seconds)
        assert first[arm].profiles == again[arm].profiles
        assert not np.array_equal(first[arm].seconds, other[arm].seconds)


def test_without_noise_times_are_those_of_equation_1():
    run = replay(PROFILES, constant(1e8, 6), Load(1e8, model_seconds=0.5))
    best = Envelope(PROFILES).best(1e8)
    assert run["oracle"].seconds == pytest.approx(0.5 + 1e8 * best.seconds_per_byte(1e8))
    assert run["no compression"].seconds == pytest.approx(1.5)
    assert set(run["best static"].profiles) == {best.name}


def test_nobody_beats_the_oracle_and_regret_only_grows():
    for run in replay(PROFILES, TRACE, LOAD, contention=[Contention(10, 30, 3)]).values():
        assert np.all(np.diff(run.regret) >= -1e-12)
        assert run.relative_regret >= 0
    assert run.arm == "oracle"
    assert run.relative_regret == 0


def test_contention_slows_codecs_and_never_the_plain_cache():
    calm, busy = (
        replay(PROFILES[:1], constant(1e8, 20), Load(1e8), contention=c) for c in ([], [Contention(5, 10, 4)])
    )
    assert np.array_equal(calm["no compression"].seconds, busy["no compression"].seconds)
    slowed = busy["best static"].seconds > calm["best static"].seconds
    arrivals = calm["oracle"].arrivals
    assert set(calm["best static"].profiles) == set(busy["best static"].profiles) == {"2x"}
    assert np.array_equal(slowed, (arrivals >= 5) & (arrivals < 10))


def test_the_controller_loses_little_to_the_oracle_and_less_than_those_who_know_less():
    regrets = {arm: [] for arm in ARMS}
    for seed in range(6):
        contention = [Contention(8 + seed, 30 + seed, 4)]
        for arm, run in replay(PROFILES, TRACE, LOAD, contention=contention, seed=seed).items():
            regrets[arm].append(run.relative_regret)
    mean = {arm: np.mean(values) for arm, values in regrets.items()}
    assert mean["full"] <= 0.10, "our bar"
    assert mean["full"] < mean["no bandit"]
    assert mean["full"] < mean["no model"]


@pytest.mark.parametrize("bandwidth", np.geomspace(1e7, 1e11, 9))
def test_at_a_constant_bandwidth_it_is_never_much_worse_than_the_best_static(bandwidth):
    runs = replay(PROFILES, constant(bandwidth, 120), LOAD, arms=("full", "best static", "no compression"))
    started = slice(1, None)  # before the first acknowledgement nobody knows the link
    full, static = (runs[arm].seconds[started].mean() for arm in ("full", "best static"))
    assert full <= 1.05 * static
    if bandwidth > 1.3 * max(profile.break_even for profile in PROFILES):
        assert set(runs["full"].profiles) == {NO_COMPRESSION.name}


def test_it_beats_every_static_choice_somewhere():
    ahead = dict.fromkeys([NO_COMPRESSION, *PROFILES], 0.0)
    for bandwidth in np.geomspace(1e7, 1e11, 9):
        run = replay(PROFILES, constant(bandwidth, 60), Load(1e8), arms=("full",))["full"]
        for profile in ahead:
            ahead[profile] = max(ahead[profile], 1e8 * profile.seconds_per_byte(bandwidth) / run.seconds[1:].mean())
    assert min(ahead.values()) >= 1.2, "our bar"


def test_profiles_of_too_little_quality_are_nobodys_choice():
    poor = MeasuredProfile.from_speed("poor", 20, 1e10, {"any": 0.5})
    runs = replay([*PROFILES, poor], TRACE, Load(1e8, min_quality=0.9))
    assert not any("poor" in run.profiles for run in runs.values())


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="unknown arm luck; allowed are full"):
        replay(PROFILES, TRACE, LOAD, arms=("luck",))


def test_settings_reach_the_controller():
    runs = [replay(PROFILES, TRACE, LOAD, arms=("full",), settings=ControllerSettings(epsilon=e)) for e in (0, 1)]
    assert runs[0]["full"].profiles != runs[1]["full"].profiles


def test_traces():
    assert constant(5, 10).at(7) == 5
    steps = step([1, 2, 4], each=10)
    assert [steps.at(t) for t in (0, 9.9, 10, 25, 99)] == [1, 1, 2, 4, 4]
    assert steps.duration == 30
    wave = sine(1, 100, period=20, duration=60)
    assert wave.at(0) == pytest.approx(10)
    assert wave.at(5) == pytest.approx(100, rel=0.02)
    assert wave.at(15) == pytest.approx(1, rel=0.02)
    walk = random_walk(1e6, 1e8, 300, spread=0.5, seed=4)
    assert walk == random_walk(1e6, 1e8, 300, spread=0.5, seed=4)
    assert walk != random_walk(1e6, 1e8, 300, spread=0.5, seed=5)
    assert 1e6 <= min(walk.bandwidths) < 5e6
    assert 2e7 < max(walk.bandwidths) <= 1e8
    assert random_walk(5.0, 5.0, 3).at(2) == pytest.approx(5)
    given = Trace((0, 10, 20), (1, 3, 2))
    assert given.at(5) == 2
    assert given.scaled(10).at(15) == 25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trace((), ()), "each needs one"),
        (lambda: Trace((0, 1), (1,)), "each needs one"),
        (lambda: Trace((1, 2), (1, 1)), "start at 0"),
        (lambda: Trace((0, 0), (1, 1)), "increase"),
        (lambda: Trace((0, 1), (1, 0)), "bandwidth is 0"),
        (lambda: Contention(2, 1, 3), "must end after"),
        (lambda: Contention(0, 1, 0), "slowdown is 0"),
        (lambda: Load(0), "raw_bytes is 0"),
        (lambda: Load(1, every=0), "every is 0"),
        (lambda: Load(1, noise=-1), "noise is -1"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_trace_in_which_no_request_comes_is_refused():
    with pytest.raises(ValueError, match=r"lasts 0\.0 s; no request comes"):
        replay(PROFILES, Trace((0.0,), (1e8,)), LOAD)
