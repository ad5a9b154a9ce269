"""The bandwidth explorer draws what its sliders say."""

import pytest

from diffkv_repro.explore.bandwidth import bandwidth_explorer, draw_envelope
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import Envelope, MeasuredProfile

PROFILES = [MeasuredProfile.from_speed(name, ratio, speed) for name, ratio, speed in [("2x", 2, 8e9), ("8x", 8, 1e9)]]


def test_the_title_names_the_best():
    edge = Envelope(PROFILES).bandwidths[0] / GBPS
    assert draw_envelope(PROFILES, 0.9 * edge).layout.title.text.endswith(": 2x")
    assert draw_envelope(PROFILES, 0.9 * edge, slowdown=2).layout.title.text.endswith(": none")


@pytest.mark.parametrize("wrong", [{"gbps": 0}, {"gbps": 1, "slowdown": -1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        draw_envelope(PROFILES, **wrong)


def test_a_slider_redraws():
    box = bandwidth_explorer(PROFILES)
    bandwidth, slowdown = box.children[0].children
    before = box.children[1].layout.title.text
    slowdown.value = 10
    bandwidth.value = 10**bandwidth.max
    assert box.children[1].layout.title.text != before
    assert box.children[1].layout.title.text.endswith(": none")
