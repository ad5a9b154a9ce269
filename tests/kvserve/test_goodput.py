"""Goodput from acknowledgements: weighted by bytes, ageing, and deaf to impossible intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.kvserve.goodput import GoodputEstimator


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_known_before_the_first_acknowledgement(clock):
    link = GoodputEstimator(clock=clock)
    assert link.bandwidth is None
    assert link.age is None


def test_bytes_over_seconds_not_a_mean_of_rates(clock):
    link = GoodputEstimator(clock=clock)
    link.acknowledge(9_000_000, 9.0)
    link.acknowledge(1_000_000, 0.1)
    assert link.bandwidth == pytest.approx(10_000_000 / 9.1)


def test_the_old_fades(clock):
    link = GoodputEstimator(half_life=2.0, clock=clock)
    link.acknowledge(1e6, 1.0)
    clock.now = 2.0
    link.acknowledge(4e6, 1.0)
    assert link.bandwidth == pytest.approx((0.5 * 1e6 + 4e6) / 1.5)
    clock.now = 1e6
    link.acknowledge(7e6, 1.0)
    assert link.bandwidth == pytest.approx(7e6)


def test_a_stale_estimate_is_none_at_all(clock):
    link = GoodputEstimator(stale_after=60, clock=clock)
    link.acknowledge(1e6, 1.0)
    clock.now = 60.0
    assert link.bandwidth == 1e6
    assert link.age == 60.0
    clock.now = 60.1
    assert link.bandwidth is None


@pytest.mark.parametrize(
    ("sent", "seconds"), [(1e6, 0), (1e6, -1), (1e6, math.nan), (math.inf, 1), (0, 1), (-5, 1), (100, 1)]
)
def test_what_cannot_be_or_says_little_is_left_out(clock, sent, seconds):
    link = GoodputEstimator(clock=clock)
    link.acknowledge(2e6, 1.0)
    link.acknowledge(sent, seconds)
    assert link.bandwidth == 2e6
    assert link.left_out == 1


def test_a_clock_that_steps_back_ages_nothing(clock):
    link = GoodputEstimator(clock=clock)
    clock.now = 100.0
    link.acknowledge(1e6, 1.0)
    clock.now = 1.0
    assert link.age == 0
    link.acknowledge(3e6, 1.0)
    assert link.bandwidth == pytest.approx(2e6)


@given(st.lists(st.tuples(st.floats(1e4, 1e10), st.floats(1e-6, 1e3), st.floats(0, 100)), min_size=1, max_size=30))
def test_it_stays_between_the_slowest_and_the_fastest(transfers):
    clock = Clock()
    link = GoodputEstimator(clock=clock, stale_after=1e9)
    for sent, seconds, wait in transfers:
        clock.now += wait
        link.acknowledge(sent, seconds)
    rates = [sent / seconds for sent, seconds, _ in transfers]
    assert min(rates) * (1 - 1e-9) <= link.bandwidth <= max(rates) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [{"half_life": 0}, {"stale_after": -1}, {"least_bytes": 0}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        GoodputEstimator(**wrong)
