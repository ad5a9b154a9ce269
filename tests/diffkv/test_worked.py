"""Cases worked by hand come out of the real store and the real rules."""

import pytest

from diffkv_repro.cache.store import DROPPED
from diffkv_repro.diffkv.worked import (
    algorithm_1_outcomes,
    figure_1,
    most_victims,
    rules_disagree,
    significance_by_phase,
    stored_tiers,
)


def test_every_outcome_of_algorithm_1_is_reached():
    outcomes = algorithm_1_outcomes()
    assert len(outcomes) == 6
    assert all(outcomes.values()), outcomes


def test_the_two_rules_part_over_one_token():
    """Algorithm 1 prunes the candidate's victim, the released rule demotes it and prunes the least low token."""
    first, second = rules_disagree()
    assert first == [0, 0, 1, DROPPED, 0, 1, 0, 0, 0]
    assert second == [0, 0, DROPPED, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_of_one_head_touches_one_older_token_at_most(seed):
    assert most_victims(steps=80, seed=seed) == 1


def test_the_order_of_maximum_and_sum_doubles_a_score_that_heads_take_turns_at():
    as_prompt, as_decoding = significance_by_phase()
    assert as_prompt == pytest.approx(1, abs=1e-5)
    assert as_decoding == pytest.approx(2, abs=1e-5)


def test_tiers_of_figure_1_in_bytes():
    assert figure_1(1, 3, 1) == [0, 1, 1, 1, DROPPED]
    size = stored_tiers([figure_1(1, 3, 1), figure_1(2, 2, 1)], ["K8V4", "K4V2"])
    high, low, head_dim = 3, 5, 128
    assert size.payload == head_dim * (high * 12 + low * 6) // 8
    assert size.scales == 8 * (high + low)
    assert size.full == 4 * head_dim * 10
    assert size.nominal_ratio == pytest.approx(0.20625)
    assert size.payload + size.scales + size.scores + size.positions == 208 * high + 112 * low


def test_pruning_and_eight_bits_of_figure_1():
    pruned = stored_tiers([figure_1(4, 0, 1)] * 2, ["K16V16", "K16V16"])
    assert pruned.nominal_ratio == pytest.approx(0.8)
    assert stored_tiers([figure_1(5, 0, 0)] * 2, ["K8V8"]).nominal_ratio == pytest.approx(0.5)


def test_another_head_size():
    size = stored_tiers([figure_1(0, 5, 0)], ["K8V4", "K4V2"], head_dim=64)
    assert (size.payload, size.full) == (64 * 6 * 5 // 8, 4 * 64 * 5)
