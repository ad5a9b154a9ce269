"""Theorems 6.1 and 6.2 hold for every set of profiles, ties and useless profiles included."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diffkv_repro.kvserve.latency import (
    NO_COMPRESSION,
    Envelope,
    MeasuredProfile,
    ServiceContext,
    fastest,
    feasible,
    released_choice,
    released_error,
    transfer_seconds,
)

speeds = st.one_of(st.sampled_from([1e8, 1e9, 3e9, math.inf]), st.floats(1e6, 1e13))
ratios = st.one_of(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), st.floats(0.1, 50))
profiles = st.builds(MeasuredProfile, st.text("pq", min_size=1, max_size=3), ratios, speeds, speeds)
bandwidths = st.floats(1e3, 1e15)


def pair(ratio=8.0, speed=1e9, name="p", **quality):
    return MeasuredProfile.from_speed(name, ratio, speed, quality or None)


@given(profiles, bandwidths, st.floats(1, 1e13))
def test_a_profile_pays_exactly_below_its_threshold(profile, bandwidth, raw_bytes):
    if math.isclose(bandwidth, profile.break_even, rel_tol=1e-9):
        return
    context = ServiceContext("w", raw_bytes, bandwidth)
    gain = profile.seconds_per_byte(bandwidth) < NO_COMPRESSION.seconds_per_byte(bandwidth) * (1 - 1e-12)
    if profile.codec_seconds > 1e-6 / bandwidth:  # else the two times differ by less than a float shows
        assert gain == (bandwidth < profile.break_even)
        assert (transfer_seconds(profile, context) < transfer_seconds(NO_COMPRESSION, context)) == gain


@given(st.lists(profiles, max_size=12), bandwidths, st.booleans())
@example([pair(), pair(name="twin"), pair(4.0)], 1e8, True)
@example([MeasuredProfile("free", 2.0, math.inf, math.inf)], 1e15, True)
def test_the_look_up_equals_trying_all(given_profiles, bandwidth, with_none):
    lines = given_profiles + [NO_COMPRESSION] * with_none
    if not lines:
        return
    envelope = Envelope(given_profiles, with_none=with_none)
    least = min(profile.seconds_per_byte(bandwidth) for profile in lines)
    assert envelope.best(bandwidth).seconds_per_byte(bandwidth) <= least * (1 + 1e-12)
    assert set(map(id, envelope.profiles)) <= set(map(id, lines))


@given(st.lists(profiles, max_size=12))
def test_edges_lie_where_neighbours_are_equal(given_profiles):
    envelope = Envelope(given_profiles)
    assert len(envelope.edges) == len(envelope.profiles) - 1
    assert all(a <= b for a, b in zip(envelope.edges, envelope.edges[1:], strict=False))
    for left, right, bandwidth in zip(envelope.profiles, envelope.profiles[1:], envelope.bandwidths, strict=False):
        assert left.seconds_per_byte(bandwidth) == pytest.approx(right.seconds_per_byte(bandwidth), rel=1e-9)
        assert left.ratio < right.ratio
        assert left.speed > right.speed


@given(st.lists(profiles, min_size=1, max_size=12))
def test_its_ends_are_the_largest_ratio_and_the_quickest(given_profiles):
    envelope = Envelope(given_profiles)
    assert envelope.profiles[-1].ratio == max(profile.ratio for profile in [NO_COMPRESSION, *given_profiles])
    assert envelope.profiles[0].speed == math.inf
    threshold = max(profile.break_even for profile in given_profiles)
    if math.isfinite(threshold):
        assert envelope.best(2 * threshold + 1) is NO_COMPRESSION


def test_of_equal_lines_the_first_stays_and_no_compression_before_all():
    twins = [pair(name="a"), pair(name="b"), MeasuredProfile("idle", 1.0, math.inf, math.inf)]
    assert [profile.name for profile in Envelope(twins).profiles] == ["none", "a"]


def test_a_line_that_only_touches_the_envelope_changes_nothing():
    # Intercepts 1, 2, 3 and slopes 2/3, 1/2, 1/3: through one point, and the middle one is never the only best.
    lines = [MeasuredProfile("a", 1.5, 2, 2), MeasuredProfile("b", 2, 1, 1), MeasuredProfile("c", 3, 1, 0.5)]
    envelope = Envelope(lines, with_none=False)
    assert [profile.name for profile in envelope.profiles] == ["a", "c"]
    assert envelope.edges == (6.0,)


def test_lines_that_differ_by_one_ulp_keep_their_order():
    quick = MeasuredProfile("quick", 2.0, 1e9, 1e9)
    envelope = Envelope([MeasuredProfile("slow", math.nextafter(2.0, 3), 1e9, 1e9 * (1 - 1e-14)), quick])
    assert [profile.name for profile in envelope.profiles] == ["none", "quick", "slow"]


def test_candidates_are_the_best_and_its_neighbours():
    envelope = Envelope([pair(2.0, 8e9, "2x"), pair(4.0, 2e9, "4x"), pair(8.0, 5e8, "8x")])
    names = [profile.name for profile in envelope.profiles]
    assert names == ["none", "2x", "4x", "8x"]
    middle = math.sqrt(envelope.bandwidths[0] * envelope.bandwidths[1])
    assert [profile.name for profile in envelope.candidates(middle)] == ["none", "2x", "4x"]
    assert [profile.name for profile in envelope.candidates(1e15)] == ["none", "2x"]
    assert [profile.name for profile in envelope.candidates(1.0, reach=0)] == ["8x"]


def test_the_fastest_may_lie_off_the_envelope():
    envelope = Envelope([pair(2.0, 8e9, "2x"), pair(4.0, 2e9, "4x"), pair(4.0, 1.9e9, "nearly 4x")])
    assert "nearly 4x" not in [profile.name for profile in envelope.profiles]
    assert [profile.name for profile in envelope.fastest(1e8, 2)] == ["4x", "nearly 4x"]
    assert len(envelope.fastest(1e8, 9)) == 4


def test_equations_2_and_3():
    quick, small = pair(2.0, 8e9, "quick", qa=0.99), pair(8.0, 5e8, "small", qa=0.95)
    slow_link = ServiceContext("qa", 1e9, 1e7)
    assert fastest([quick, small, NO_COMPRESSION], slow_link) is small
    assert fastest([quick, small], ServiceContext("qa", 1e9, 1e7, min_quality=0.97)) is quick
    assert fastest([quick, small], ServiceContext("other", 1e9, 1e7, min_quality=0.5)) is None
    assert feasible([quick, small], ServiceContext("qa", 1e9, 1e7, slo=20)) == [small]
    assert transfer_seconds(NO_COMPRESSION, ServiceContext("qa", 1e9, 1e7, model_seconds=3)) == pytest.approx(103)
    with pytest.raises(ValueError, match="needs one"):
        transfer_seconds(quick, ServiceContext("qa", 1e9, None))


def test_the_released_table_prefers_the_least_threshold():
    # The two profiles of one bucket of the released library: 8.7 is faster at 10 Gbps by 1.34 times.
    ans, bitcomp = pair(8.6675, 36.264e9, "ans"), pair(5.9098, 38.596e9, "bitcomp")
    assert bitcomp.break_even < ans.break_even
    assert released_choice([ans, bitcomp], 1.25e9) is bitcomp
    assert Envelope([ans, bitcomp]).best(1.25e9) is ans
    error = released_error([ans, bitcomp], [1.25e9, 1e12])
    assert (error.n, error.share_slower) == (2, 0.5)
    assert error.worst_factor == pytest.approx(1.345, abs=1e-3)


@given(st.lists(profiles, max_size=8), bandwidths)
def test_the_released_table_is_never_faster(given_profiles, bandwidth):
    assert released_error(given_profiles, [bandwidth]).worst_factor >= 1 - 1e-9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeasuredProfile("", 2, 1, 1), "needs a name"),
        (lambda: MeasuredProfile("p", 0, 1, 1), "ratio of p is 0"),
        (lambda: MeasuredProfile("p", math.nan, 1, 1), "ratio of p is nan"),
        (lambda: MeasuredProfile("p", 2, 0, 1), "encode of p is 0"),
        (lambda: MeasuredProfile("p", 2, 1, math.nan), "decode of p is nan"),
        (lambda: MeasuredProfile("p", 2, 1, 1, {"qa": -1}), "quality of p on qa is -1"),
        (lambda: ServiceContext("w", 0, 1), "raw_bytes is 0"),
        (lambda: ServiceContext("w", 1, 0), "bandwidth is 0"),
        (lambda: ServiceContext("w", 1, 1, slo=0), "slo is 0"),
        (lambda: ServiceContext("w", 1, 1, min_quality=math.nan), "min_quality is nan"),
        (lambda: ServiceContext("w", 1, 1, model_seconds=-1), "model_seconds is -1"),
        (lambda: Envelope([], with_none=False), "no profile at all"),
        (lambda: Envelope([]).best(0), "bandwidth is 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
