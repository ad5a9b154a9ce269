"""Requests on a shared link against what queueing theory and plain arithmetic say; arithmetic on published times."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffkv_repro.kvserve import transfers
from diffkv_repro.kvserve.latency import NO_COMPRESSION, Envelope, MeasuredProfile, ServiceContext, transfer_seconds
from diffkv_repro.kvserve.queueing import OpenLoop, sweep

PROFILES = [MeasuredProfile.from_speed("2x", 2, 8e9), MeasuredProfile.from_speed("8x", 8, 1e9)]


@given(st.floats(1e6, 1e11), st.floats(1e6, 1e10), st.sampled_from([NO_COMPRESSION, *PROFILES]))
def test_one_request_at_a_time_takes_what_equation_1_says(bandwidth, raw_bytes, profile):
    run = OpenLoop((0.0,), raw_bytes, bandwidth, prefill=0.5, decode=0.25).static(profile)
    context = ServiceContext("any", raw_bytes, bandwidth, model_seconds=0.75)
    assert run["seconds"][0] == pytest.approx(transfer_seconds(profile, context))
    assert run["queue"][0] == 0


def test_a_queue_of_one_link_waits_as_long_as_theory_says():
    """Poisson arrivals, equal requests: the mean wait of M/D/1 is load / (2 (1 - load)) services."""
    load, service = 0.7, 1.0
    arrivals = transfers.poisson(load / service, 40_000, 3)
    run = OpenLoop(tuple(arrivals), 1e6, 1e6 / service).static(NO_COMPRESSION)
    assert run["queue"].mean() == pytest.approx(load / (2 * (1 - load)) * service, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=30), st.sampled_from([NO_COMPRESSION, *PROFILES]))
def test_nothing_is_lost_and_the_link_carries_one_at_a_time(gaps, profile):
    load = OpenLoop(tuple(np.cumsum(gaps)), 1e8, 1e8, prefill=0.1)
    run = load.static(profile)
    assert len(run) == len(gaps)
    ends = run["arrival"] + 0.1 + run["encode"] + run["waited"] + run["queue"] + run["send"]
    assert (run["seconds"] >= run["communication"] - 1e-9).all()
    assert ends.max() >= len(gaps) * run["send"].iloc[0] - 1e-9
    assert run["sent"].sum() == pytest.approx(len(gaps) * 1e8 / profile.ratio)


def test_alone_the_adaptive_arm_takes_the_envelopes_choice_and_under_load_it_beats_no_compression():
    gbps = [0.5, 2.0, 8.0, 200.0]
    alone = sweep(1e8, PROFILES, gbps, rate=1, requests=3, seeds=1, closed=True)
    for value, row in alone.iterrows():
        best = Envelope(PROFILES).best(value * 1e9 / 8)
        assert row["adaptive"] == pytest.approx(row[best.name])
    queued, alone = (sweep(1e9, PROFILES, [5.0], rate=1, requests=20, seeds=5, closed=one) for one in (False, True))
    gains = [own["none"][5.0] / own["adaptive"][5.0] for own in (queued, alone)]
    assert gains[0] > 2 * gains[1], "the queue goes too"


@pytest.mark.parametrize(("arrivals", "message"), [((), "0 arrivals"), ((1.0, 0.5), "in order")])
def test_arrivals_that_cannot_be_are_refused(arrivals, message):
    with pytest.raises(ValueError, match=message):
        OpenLoop(arrivals, 1e6, 1e6)


def rows(scatter=0.0, seed=0):
    """Transfers that take exactly what equation 1 says, but for some scatter of the codecs."""
    draw, raw, found = np.random.default_rng(seed), 2e7, []
    for _ in range(5):
        for gbps in (0.1, 0.5, 1.0, 4.0, 16.0):
            for one in (NO_COMPRESSION, *PROFILES):
                encode, decode = (raw / way * (1 + scatter * draw.normal()) for way in (one.encode, one.decode))
                send = raw / one.ratio / (gbps * 1e9 / 8)
                found.append({
                    "arm": one.name, "profile": one.name, "gbps": gbps, "encode": encode + 0.01,
                    "decode": decode + 0.01, "send": send, "seconds": encode + decode + send + 0.025,
                    "ratio": one.ratio, "goodput": gbps * 1e9 / 8,
                })  # fmt: skip
    return pd.DataFrame(found), raw


def test_transfers_that_follow_equation_1_are_predicted_and_have_the_right_signs():
    frame, raw = rows()
    profiles, common = transfers.calibrated(frame, raw)
    assert common == pytest.approx(0.025)
    assert {one.name: one.break_even for one in profiles} == pytest.approx(
        {one.name: one.break_even for one in PROFILES}, rel=1e-6
    )
    np.testing.assert_allclose(transfers.predicted(frame, raw), frame["seconds"], rtol=1e-9)
    assert transfers.signs(frame, raw) == (10, 10)
    scattered, raw = rows(scatter=0.1)
    errors = (transfers.predicted(scattered, raw) / scattered["seconds"] - 1).abs()
    assert 0 < errors.median() < 0.1


def test_choices_are_judged_by_what_their_profiles_take():
    frame, _ = rows()
    chosen = {0.1: "8x", 0.5: "8x", 1.0: "2x", 4.0: "none", 16.0: "2x"}
    taken = frame[[chosen[gbps] == name for gbps, name in zip(frame["gbps"], frame["profile"], strict=True)]]
    slow = taken.assign(arm=transfers.ADAPTIVE)
    found = transfers.over_best(pd.concat([frame, slow]))
    times = frame.groupby(["gbps", "profile"])["seconds"].median().unstack()
    for gbps, name in chosen.items():
        assert found[gbps] == pytest.approx(times[name][gbps] / times.loc[gbps].min())


def test_a_wrong_choice_now_and_then_is_not_hidden_by_the_right_ones():
    frame, _ = rows()
    at = frame[frame["gbps"] == 0.1]
    right, wrong = (at[at["profile"] == name].assign(arm=transfers.ADAPTIVE) for name in ("8x", "none"))
    found = transfers.over_best(pd.concat([frame, right.iloc[:4], wrong.iloc[:1]]))
    times = at.groupby("profile")["seconds"].median()
    assert found[0.1] == pytest.approx((4 * times["8x"] + times["none"]) / 5 / times.min())
    assert found[0.1] > 1.5
