"""Where the prompt of a policy's layer ends up."""

import pytest
import torch
from cache_helpers import place_of, prompt_of, random_call, rows_of
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.diffkv import CompressionPolicy

MAKERS = {"paper": CompressionPolicy.paper, "released": CompressionPolicy.released}


def tiers_of(policy, call, padding=None, storage="simulated"):
    place = place_of(kv_heads=call.key.shape[1], group=call.query.shape[1] // call.key.shape[1])
    layer = TieredLayer(place, policy.rule(place), storage=storage)
    layer.prefill(prompt_of(call, padding), rows_of(len(call.key), call.key.shape[2], padding))
    return layer.store.tier


@pytest.mark.parametrize("make", MAKERS)
@given(tokens=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_prompt_no_longer_than_the_window_is_left_alone(make, tokens, seed):
    policy = MAKERS[make](alpha_high=1e6, alpha_low=1e6, window=20)
    assert not bool(tiers_of(policy, random_call(tokens=tokens, seed=seed)).any())


@pytest.mark.parametrize("make", MAKERS)
@given(tokens=st.integers(1, 40), window=st.integers(1, 50), seed=st.integers(0, 99), padded=st.integers(0, 39))
def test_the_window_stays_in_the_first_tier_and_padding_in_none(make, tokens, window, seed, padded):
    padding = (0, min(padded, tokens - 1))
    policy = MAKERS[make](alpha_high=1e6, alpha_low=1e6, window=window)
    tier = tiers_of(policy, random_call(tokens=tokens, seed=seed), padding)
    for row, hidden in enumerate(padding):
        assert bool((tier[row, :, :hidden] == DROPPED).all())
        recent = max(hidden, tokens - window)
        assert not bool(tier[row, :, recent:].any())
        assert bool((tier[row, :, hidden:recent] == DROPPED).all())


@pytest.mark.parametrize("divisor", ["position", "length"])
@pytest.mark.parametrize("kind", [Significance(), Significance("last", 64, own_score=True), Significance("last", 4)])
@pytest.mark.parametrize("padding", [None, (0, 9)])
def test_thresholds_are_alpha_over_position_or_length(divisor, kind, padding):
    call, tokens, window = random_call(tokens=30), 30, 4
    alphas = (1.2, 0.7, 0.3)
    policy = CompressionPolicy(("K8V8", "K4V4", "K2V2"), alphas, window, kind, prompt_divisor=divisor)
    significance = kind.of_prompt(prompt_of(call, padding))
    seen = tiers_of(policy, call, padding)
    used = set()
    for row in range(2):
        hidden = 0 if padding is None else padding[row]
        for head in range(2):
            for column in range(hidden, tokens - window):
                over = column - hidden + 1 if divisor == "position" else tokens - hidden
                value = float(significance[row, head, column])
                expected = sum(value <= alpha / over for alpha in alphas[:-1])
                expected = DROPPED if value < alphas[-1] / over else expected
                used.add(expected)
                assert int(seen[row, head, column]) == expected
    assert used == {0, 1, 2, DROPPED}, "all outcomes were tried"


def test_alphas_of_a_head_act_on_that_head_alone():
    call = random_call(tokens=30, layer=1)
    low, high = CompressionPolicy.paper(alpha_low=0.2, window=4), CompressionPolicy.paper(alpha_low=0.9, window=4)
    table = ((9.0, 9.0), (0.2, 0.9), (9.0, 9.0))
    mixed = CompressionPolicy(alphas=(9.0, table), window=4)
    place = place_of(layer=1, layers=3)
    layer = TieredLayer(place, mixed.rule(place), storage="simulated")
    layer.prefill(prompt_of(call), rows_of(2, 30))
    pruned = layer.store.tier == DROPPED
    assert torch.equal(pruned[:, 0], tiers_of(low, call)[:, 0] == DROPPED)
    assert torch.equal(pruned[:, 1], tiers_of(high, call)[:, 1] == DROPPED)
    assert int(pruned[:, 0].sum()) != int(pruned[:, 1].sum())


def test_a_table_of_equal_alphas_is_one_alpha():
    call = random_call(tokens=30)
    one = CompressionPolicy(alphas=(1.0, 0.3), window=4)
    table = CompressionPolicy(alphas=(((1.0, 1.0),), ((0.3, 0.3),)), window=4)
    assert torch.equal(tiers_of(one, call), tiers_of(table, call))


def test_higher_alphas_only_move_tokens_down():
    call, before = random_call(tokens=40), None
    for alpha in (0.0, 0.2, 0.5, 1.0, 2.0, 50.0):
        tier = tiers_of(CompressionPolicy.paper(alpha_high=2 * alpha, alpha_low=alpha, window=4), call)
        rank = torch.where(tier == DROPPED, 9, tier)
        assert before is None or bool((rank >= before).all())
        before = rank


def test_alphas_of_zero_prune_nothing_and_equal_ones_leave_the_low_tier_empty():
    call = random_call(tokens=40)
    assert not bool((tiers_of(CompressionPolicy.paper(alpha_high=2.0, alpha_low=0.0, window=4), call) == DROPPED).any())
    tier = tiers_of(CompressionPolicy.paper(alpha_high=0.8, alpha_low=0.8, window=4), call)
    assert sorted(tier.unique().tolist()) == [DROPPED, 0]


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_running_scores_start_with_what_the_prompt_gave(storage):
    call, padding = random_call(tokens=30), (0, 9)
    for group_max, width in (("of-means", 3), ("each-step", 1)):
        policy = CompressionPolicy.paper(alpha_low=0.3, window=4, group_max=group_max)
        layer = TieredLayer(place_of(), policy.rule(place_of()), storage=storage)
        layer.prefill(prompt_of(call, padding), rows_of(2, 30, padding))
        sums = Significance().sums(prompt_of(call, padding))
        sums = sums if width == 3 else sums.amax(dim=2, keepdim=True)
        kept = (layer.store.tier != DROPPED)[:, :, None]
        assert layer.store.scores.shape == (2, 2, width, 30)
        torch.testing.assert_close(layer.store.scores, torch.where(kept, sums, 0.0))
