"""The bandwidth explorer draws what its sliders say."""

import pytest
from explore_helpers import PROFILES

from diffkv_repro.explore import bandwidth_explorer, decide, draw_choice, draw_envelope
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import Envelope, MeasuredProfile

TWO = [MeasuredProfile.from_speed(name, ratio, speed) for name, ratio, speed in [("2x", 2, 8e9), ("8x", 8, 1e9)]]


def test_the_title_names_the_best():
    edge = Envelope(TWO).bandwidths[0] / GBPS
    assert draw_envelope(TWO, 0.9 * edge).layout.title.text.endswith(": 2x")
    assert draw_envelope(TWO, 0.9 * edge, slowdown=2).layout.title.text.endswith(": none")


@pytest.mark.parametrize("wrong", [{"gbps": 0}, {"gbps": 1, "slowdown": -1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        draw_envelope(TWO, **wrong)
    with pytest.raises(ValueError, match="must be above 0"):
        decide(TWO, **wrong)


def test_a_slider_redraws():
    explorer = bandwidth_explorer(TWO)
    before = explorer.figure.layout.title.text
    explorer.controls["slowdown"].value = 10
    explorer.controls["gbps"].value = 10 ** explorer.controls["gbps"].max
    assert explorer.figure.layout.title.text != before
    assert explorer.figure.layout.title.text.endswith(": none")


def test_the_choice_is_the_best_of_those_that_are_good_enough():
    for gbps in (0.3, 2, 8, 30, 100):
        decision = decide(PROFILES, gbps, min_quality=0.95)
        assert decision.profile is Envelope(PROFILES[:2]).best(gbps * GBPS) or decision.profile.name in (
            "2x",
            "4x",
            "none",
        )
        assert decision.profile.name == Envelope(PROFILES[:2]).best(gbps * GBPS).name
        figure = draw_choice(PROFILES, decision)
        (star,) = (trace for trace in figure.data if trace.name == "the choice")
        assert star.x[0] == pytest.approx(gbps)
        dotted = {trace.name for trace in figure.data if trace.line.dash == "dot"}
        assert dotted == {"8x", "not judged"}


def test_a_late_choice_says_so():
    decision = decide(PROFILES, 1, slo_ms=1)
    assert draw_choice(PROFILES, decision).layout.title.text.endswith("no SLO is kept")


def test_without_a_profile_nothing_is_drawn():
    explorer = bandwidth_explorer(PROFILES)
    explorer.controls["profiles"].value = ()
    assert "pick at least one" in explorer.said.value
    assert explorer.figure not in explorer.children
