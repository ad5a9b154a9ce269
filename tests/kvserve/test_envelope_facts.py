"""What notebook 12 counts can be trusted: each count finds what is planted."""

import math

import pytest

from diffkv_repro.kvserve import envelope_facts as facts
from diffkv_repro.kvserve.controller import ControllerSettings
from diffkv_repro.kvserve.latency import MeasuredProfile

PROFILES = tuple(
    MeasuredProfile.from_speed(name, ratio, speed)
    for name, ratio, speed in [("2x", 2, 8e9), ("4x", 4, 3e9), ("8x", 8, 1e9)]
)


def test_published_components_combine_to_the_papers_speeds():
    parts = {"quantiser": [7.6, 24.8], "ans": [72, 172]}
    assert facts.of_parts("p", 8, parts, ["ans"]).speed == pytest.approx(5.5e9, rel=1e-3)
    four = facts.of_parts("p", 8, {"quantiser": [30, 99], "ans": [149, 156]}, ["ans"])
    assert four.break_even / facts.GBPS == pytest.approx(140, abs=0.1)


def test_both_theorems_hold_at_random():
    assert facts.threshold_disagreements(500, seed=1) == 0
    assert facts.envelope_disagreements(20, 10, seed=1) == (0, 1.0)


def test_a_wrong_look_up_would_be_counted(monkeypatch):
    monkeypatch.setattr(facts.Envelope, "interval", lambda self, bandwidth: 0)
    wrong, ends = facts.envelope_disagreements(20, 10, seed=1)
    assert wrong > 50
    assert ends < 1


@pytest.mark.parametrize("raw_bytes", [1e6, 1e12])
def test_both_take_equally_long_at_the_threshold(raw_bytes):
    for profile in PROFILES:
        assert facts.equal_time_bandwidth(profile, raw_bytes) == pytest.approx(profile.break_even, rel=1e-9)


def test_only_the_last_break_even_is_a_breakpoint():
    assert facts.break_evens_on_envelope(PROFILES) == 1


def test_candidates_hold_the_fastest_without_drift_and_lose_it_with_more():
    shares = [facts.share_in_candidates(PROFILES, drift, 400, seed=0) for drift in (0.0, 0.1, 2.0)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.95
    assert facts.share_in_candidates(PROFILES, 2.0, 400, seed=0, within=0.5) > shares[-1]
    assert facts.share_in_candidates(PROFILES, 2.0, 400, seed=0, fastest=4) == 1
    alone = facts.share_in_candidates(PROFILES, 0.5, 400, seed=0, reach=0)
    assert alone < facts.share_in_candidates(PROFILES, 0.5, 400, seed=0)


def test_a_slow_profile_is_left_and_without_learning_never():
    middles = facts.middles(PROFILES)
    assert len(middles) == 3
    assert all(1 <= facts.decisions_until_left(PROFILES, bandwidth) <= 10 for bandwidth in middles)
    stubborn = ControllerSettings(alpha=0, epsilon=0)
    assert facts.decisions_until_left(PROFILES, middles[0], settings=stubborn, most=30) == 30


def test_spells_lie_within_the_trace():
    spells = facts.random_windows(60, seed=5, count=9)
    assert spells == facts.random_windows(60, seed=5, count=9)
    for start, end, slowdown in spells:
        assert 0 <= start < end <= 60
        assert 2 <= slowdown <= 4
        assert math.isclose(end - start, 60 * 0.175, rel_tol=0.5)
