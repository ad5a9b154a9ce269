"""Stratified samples and what they say of the full set."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.kvserve.subset import documents_needed, estimate, stratified

SOURCES = ["prose"] * 50 + ["code"] * 30 + ["dialogue"] * 20


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.data())
def test_a_sample_is_in_proportion(strata, data):
    count = data.draw(st.integers(1, len(strata)))
    chosen = stratified(strata, count, seed=data.draw(st.integers(0, 3)))
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    for name in set(strata):
        share = count * strata.count(name) / len(strata)
        assert abs(sum(strata[index] == name for index in chosen) - share) < 2
    if count >= len(set(strata)):
        assert {strata[index] for index in chosen} == set(strata)


def test_seeds_draw_others_and_the_same_again():
    assert stratified(SOURCES, 10, seed=1) == stratified(SOURCES, 10, seed=1) != stratified(SOURCES, 10, seed=2)
    with pytest.raises(ValueError, match="101 documents"):
        stratified(SOURCES, 101)


def test_everything_is_certain():
    values = np.arange(100.0)
    found = estimate(values, SOURCES, SOURCES)
    assert found.mean == pytest.approx(values.mean())
    assert found.margin == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("count", [6, 12, 30])
def test_intervals_hold_the_full_mean_as_often_as_they_say(count):
    random = np.random.default_rng(0)
    values = random.normal(0, 1, 100) + np.array([{"prose": 0, "code": 3, "dialogue": -3}[name] for name in SOURCES])
    truth, held, simple, ours = values.mean(), 0, [], []
    for seed in range(400):
        chosen = stratified(SOURCES, count, seed=seed)
        found = estimate(values[chosen], [SOURCES[index] for index in chosen], SOURCES)
        held += found.low <= truth <= found.high
        ours.append(found.mean - truth)
        simple.append(values[random.choice(100, count, replace=False)].mean() - truth)
    assert 0.90 <= held / 400 <= 0.995
    assert np.std(ours) < 0.7 * np.std(simple)  # strata take out what differs between sources


def test_documents_needed_is_enough():
    random = np.random.default_rng(1)
    pilot = random.normal(0, 0.05, 40)
    count = documents_needed(pilot, ["a"] * 40, 0.01)
    assert count == math.ceil((1.959964 / 0.01) ** 2 * pilot.var(ddof=1))
    means = random.normal(0, 0.05, (2000, count)).mean(axis=1)
    assert (np.abs(means) <= 0.0115).mean() > 0.9
    with pytest.raises(ValueError, match="margin 0"):
        documents_needed(pilot, ["a"] * 40, 0)


def test_one_document_and_lonely_strata():
    assert estimate([0.5], ["prose"], SOURCES).low == -math.inf
    found = estimate([0.1, 0.2, 0.4], ["prose", "code", "dialogue"], SOURCES)
    assert found.mean == pytest.approx(0.5 * 0.1 + 0.3 * 0.2 + 0.2 * 0.4)
    assert found.margin > 0
    with pytest.raises(ValueError, match="stratum 'poems'"):
        estimate([0.1], ["poems"], SOURCES)
    with pytest.raises(ValueError, match="confidence"):
        estimate([0.1], ["prose"], SOURCES, confidence=1)
