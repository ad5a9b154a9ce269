"""Ranks become steps: as many units as the shares say, the right ones, and zero bits prune them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvserve_helpers import assets_of, kv_of, layout_of, same, sent

from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.codecs import BitPack
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.grids import KEPT
from diffkv_repro.kvserve.ladders import HeadLadder, LayerLadder, MixHQ, assign, step_counts
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.token_ladder import TokenLadder

PRUNED = ((KEPT, KEPT), (0, 0))


@given(st.integers(1, 400), st.integers(0, 100))
def test_the_lowest_rounded_share_of_units_is_low(units, percent):
    ratio = percent / 100
    scores = torch.rand(units, generator=torch.Generator().manual_seed(units))
    low = assign(scores, (1 - ratio, ratio)) == 1
    assert int(low.sum()) == round(ratio * units)
    if 0 < int(low.sum()) < units:
        assert scores[low].max() <= scores[~low].min()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 300))
def test_every_unit_is_in_one_step(weights, units):
    shares = tuple(weight / sum(weights) for weight in weights)
    counts = step_counts(shares, units)
    assert sum(counts) == units
    assert all(abs(count - share * units) <= 1 for count, share in zip(counts, shares, strict=True))


def test_mixhq_is_a_ladder_of_heads_and_saves_what_it_should():
    layout = layout_of(3, 4, 32)
    kv, assets = kv_of(layout, 200), assets_of(layout, 200)
    ladder = HeadLadder(((12, 8), (6, 4)), (0.2, 0.8))
    mixed, same_thing = (Profile((), part, Ans()).encode(kv, layout, assets=assets) for part in (MixHQ(0.8), ladder))
    assert mixed.sections[0][24:] == same_thing.sections[0][24:]
    sizes = [Profile((), MixHQ(ratio), Ans()).encode(kv, layout, assets=assets).nbytes for ratio in (0.0, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True)


def test_high_heads_have_the_smaller_error():
    layout = layout_of(2, 4, 32)
    kv, assets = kv_of(layout, 300), assets_of(layout, 300)
    got = sent(Profile((), MixHQ(0.5, 256, 2, 256, 2), Ans()), kv, layout, assets)
    low = assign(assets.heads.tensor.flatten(), (0.5, 0.5)).view(2, 4)
    for layer in range(2):
        error = (got.layers[layer].key - kv.layers[layer].key).abs().amax(dim=(1, 2))
        assert bool(
            (error[low[layer] == 1] > 10 * error[low[layer] == 0].max()).all() if (low[layer] == 0).any() else True
        )


def test_duoattention_keeps_sinks_and_recent_tokens_of_streaming_heads():
    layout = layout_of(2, 4, 16)
    kv, assets = kv_of(layout, 50), assets_of(layout, 50)
    got = sent(Profile((), HeadLadder(PRUNED, (0.5, 0.5), sink=4, recent=10), BitPack()), kv, layout, assets)
    streams = (assign(assets.heads.tensor.flatten(), (0.5, 0.5)) == 1).view(2, 4)
    ends = torch.tensor([position < 4 or position >= 40 for position in range(50)])
    for layer in range(2):
        want = ends | ~streams[layer][:, None]
        kept = got.layers[layer].kept
        assert torch.equal(want, kept if kept is not None else torch.ones_like(want))
        assert torch.equal(got.layers[layer].value, kv.layers[layer].value * want[..., None])


@pytest.mark.parametrize("tokens", [1, 3, 13, 14])
def test_protected_tokens_of_a_short_prompt_are_all_of_it(tokens):
    layout = layout_of()
    kv, assets = kv_of(layout, tokens), assets_of(layout, tokens)
    for ladder in (
        HeadLadder(PRUNED, (0.0, 1.0), sink=4, recent=10),
        TokenLadder(PRUNED, (0.0, 1.0), sink=4, recent=10),
    ):
        assert same(sent(Profile((), ladder, BitPack()), kv, layout, assets), kv)


def test_duoattention_has_the_published_ratio():
    layout = layout_of(5, 2, 64)
    kv, assets = kv_of(layout, 2000), assets_of(layout, 2000)
    frame = Profile((), HeadLadder(PRUNED, (0.2, 0.8), sink=128, recent=256), BitPack()).encode(
        kv, layout, assets=assets
    )
    assert frame.ratio == pytest.approx(1 / (1 - 0.8 + 0.8 * 384 / 2000), rel=2e-3)


def test_earlier_layers_rank_first_unless_told_otherwise():
    layout = layout_of(3, 2, 8)
    third = LayerLadder(((12, 8), (6, 4)), (0.67, 0.33))
    assert [int(third.steps_of(Place(layout, layer, 5))[0]) for layer in range(3)] == [0, 0, 1]
    assets = Assets(layer_scores=[0.1, 0.5, 0.3])
    assert [int(third.steps_of(Place(layout, layer, 5, assets=assets))[0]) for layer in range(3)] == [1, 0, 0]


def test_snapkv_keeps_its_budget_of_the_best_tokens_and_the_recent_ones():
    layout = layout_of(2, 3, 8)
    kv, assets = kv_of(layout, 60), assets_of(layout, 60)
    got = sent(Profile((), TokenLadder(PRUNED, (0.5, 0.5), recent=5, budget=20), BitPack()), kv, layout, assets)
    for layer in range(2):
        kept, scores = got.layers[layer].kept, assets.token_scores[layer]
        assert kept.sum(dim=1).tolist() == [20] * 3
        assert bool(kept[:, 55:].all())
        for head in range(3):
            chosen = scores[head, :55][kept[head, :55]]
            assert chosen.min() >= scores[head, :55][~kept[head, :55]].max()
        assert torch.equal(got.layers[layer].key, kv.layers[layer].key * kept[..., None])


def test_pyramidkv_spreads_the_same_budget_over_layers():
    layout = layout_of(5, 2, 8)
    kv, assets = kv_of(layout, 400), assets_of(layout, 400)
    got = sent(
        Profile((), TokenLadder(PRUNED, (0.5, 0.5), recent=10, budget=110, beta=20.0), BitPack()), kv, layout, assets
    )
    counts = [int(layer.kept[0].sum()) for layer in got.layers]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (10 + 195, 10 + 5)
    assert sum(counts) == 5 * 110


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadLadder(((12, 8),), (0.5, 0.5)), "one is needed for each of 1 steps"),
        (lambda: HeadLadder(((4, 8), (6, 4)), (0.5, 0.5)), "must not rise"),
        (lambda: HeadLadder(((4, 8), (0, 4)), (0.5, 0.5)), "0 levels drop keys and values together"),
        (lambda: HeadLadder(((4, 8), (4, 4)), (0.5, 0.6)), "add up to 1.1"),
        (lambda: HeadLadder("high", (1.0,)), "steps is 'high'"),
        (lambda: TokenLadder(beta=20.0), "beta is 20; it spreads a budget, and there is none"),
        (lambda: TokenLadder(sink=-1), "sink is -1"),
    ],
)
def test_bad_ladders_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_missing_and_foreign_scores_are_named():
    layout = layout_of(2, 3, 8)
    kv = kv_of(layout, 5)
    with pytest.raises(ValueError, match="ranks heads: pass assets"):
        Profile((), MixHQ(), Ans()).encode(kv, layout)
    with pytest.raises(ValueError, match="ranks tokens: pass assets"):
        Profile((), TokenLadder(), Ans()).encode(kv, layout)
    with pytest.raises(ValueError, match="head scores are of 4 layers x 3 heads"):
        Profile((), MixHQ(), Ans()).encode(kv, layout, assets=assets_of(layout_of(4, 3, 8), 5))
    with pytest.raises(ValueError, match="layer_scores are"):
        Profile((), LayerLadder(), Ans()).encode(kv, layout, assets=Assets(layer_scores=[1.0]))
    with pytest.raises(ValueError, match=r"token_scores are \(3, 9\)"):
        Profile((), TokenLadder(), Ans()).encode(kv, layout, assets=assets_of(layout, 9))
