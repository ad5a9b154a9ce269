"""What the two prompt budgets keep, against a plain selection head by head."""

import math

import numpy as np
import pytest
import torch
from cache_helpers import cut, ids_of, mask_of, place_of, positions_of, prompt_of, random_call, rows_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.budgets import AtShare, Coverage, EqualBudget, Threshold
from diffkv_repro.cache import compress
from diffkv_repro.cache.store import DROPPED

METHODS = {"equal": lambda value, **options: EqualBudget(keep=value, **options),
           "coverage": lambda value, **options: Coverage(mass=value, **options)}  # fmt: skip
shares = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))


def kept_of(method, call, padding=None, storage="simulated"):
    layer = method.layer(place_of(), storage)
    layer.prefill(prompt_of(call, padding), rows_of(len(call.key), call.key.shape[2], padding))
    return layer.store.tier != DROPPED


def each_head(call, padding, kind):
    """For each sequence and KV head: its number of tokens of padding and the significance of its own tokens."""
    significance = kind.of_prompt(prompt_of(call, padding))
    for row in range(len(call.key)):
        hidden = 0 if padding is None else padding[row]
        for head in range(call.key.shape[1]):
            yield row, head, hidden, significance[row, head, hidden:].tolist()


def rounded(share, length):
    """Both neighbours where the product lies between them but for rounding, else the nearest."""
    exact = share * length
    tie = abs(exact - math.floor(exact) - 0.5) < 1e-4
    return {math.floor(exact), math.ceil(exact)} if tie else {round(exact)}


@given(shares, st.integers(1, 40), st.integers(1, 30), st.integers(0, 39), st.integers(0, 99))
def test_an_equal_budget_keeps_the_window_and_the_most_significant(keep, tokens, window, padded, seed):
    call, padding, kind = random_call(tokens=tokens, seed=seed), (0, min(padded, tokens - 1)), Significance()
    kept = kept_of(EqualBudget(keep=keep, window=window), call, padding)
    for row, head, hidden, significance in each_head(call, padding, kind):
        own, length = kept[row, head, hidden:].tolist(), len(significance)
        assert not bool(kept[row, head, :hidden].any()), "padding"
        assert all(own[-window:])
        if length <= window:
            continue
        assert sum(own) in {max(window, count) for count in rounded(keep, length)}
        older = significance[:-window]
        chosen = [value for value, here in zip(older, own[:-window], strict=True) if here]
        assert sorted(chosen) == sorted(older)[len(older) - len(chosen) :]


@given(shares, st.integers(1, 40), st.integers(1, 30), st.integers(0, 39), st.integers(0, 99))
def test_coverage_keeps_the_fewest_tokens_that_hold_the_mass(mass, tokens, window, padded, seed):
    call, padding, kind = random_call(tokens=tokens, seed=seed), (0, min(padded, tokens - 1)), Significance()
    kept = kept_of(Coverage(mass=mass, window=window), call, padding)
    for row, head, hidden, significance in each_head(call, padding, kind):
        own = kept[row, head, hidden:].tolist()
        assert not bool(kept[row, head, :hidden].any()), "padding"
        assert all(own[-window:])
        older = np.sort(np.array(significance[:-window], dtype=np.float64))[::-1]
        chosen = [value for value, here in zip(significance[:-window], own[:-window], strict=True) if here]
        assert sorted(chosen, reverse=True) == older[: len(chosen)].tolist(), "the most significant ones"
        # Sums are in float32: a token more or less is right where it does not matter beyond their rounding.
        slack = 1e-5 * older.sum()
        assert older[: len(chosen)].sum() >= mass * older.sum() - slack
        if chosen:
            assert older[: len(chosen) - 1].sum() <= mass * older.sum() + slack


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
@given(tokens=st.integers(1, 12))
def test_a_prompt_within_the_window_is_kept_whole(name, value, tokens):
    assert bool(kept_of(METHODS[name](value, window=12), random_call(tokens=tokens)).all())


@pytest.mark.parametrize("name", METHODS)
def test_everything_and_nothing(name):
    call = random_call(tokens=30)
    assert bool(kept_of(METHODS[name](1.0, window=4), call).all())
    nothing = kept_of(METHODS[name](0.0, window=4), call)
    assert not bool(nothing[..., :-4].any())
    assert bool(nothing[..., -4:].all())


def test_a_hand_made_case():
    """Thirty tokens, the window of four, and a half: eleven older ones in every head; coverage differs by head."""
    call = random_call(tokens=30)
    assert kept_of(EqualBudget(keep=0.5, window=4), call).sum(dim=-1).unique().tolist() == [15]
    assert len(kept_of(Coverage(mass=0.5, window=4), call).sum(dim=-1).unique()) > 1


def test_equal_significance_keeps_the_count():
    """Queries of zero look at every token alike."""
    call = random_call(tokens=30)
    call.query.zero_()
    kind = Significance("last", 3)
    assert kept_of(EqualBudget(keep=0.5, window=4, significance=kind), call).sum(dim=-1).unique().tolist() == [15]
    count = kept_of(Coverage(mass=0.5, window=4, significance=kind), call).sum(dim=-1)
    assert set(count.unique().tolist()) <= {17, 18}, "half of 26 and the window, but for rounding"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [Significance(), Significance("last", 5, own_score=True)])
def test_padding_changes_nothing_for_a_sequence(name, kind):
    method = METHODS[name](0.6, window=4, significance=kind)
    call, padded = random_call(batch=1, tokens=21), random_call(batch=1, tokens=30, seed=1)
    for tensor in ("query", "key", "value"):
        getattr(padded, tensor)[:, :, 9:] = getattr(call, tensor)
    assert torch.equal(kept_of(method, padded, (9,))[..., 9:], kept_of(method, call))


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("name", METHODS)
def test_generation_prunes_nothing_and_bytes_are_those_stored(name, storage):
    call, padding = random_call(tokens=40), (0, 7)
    layer = METHODS[name](0.4, window=4).layer(place_of(), storage)
    layer.prefill(prompt_of(cut(call, 0, 30), padding), rows_of(2, 30, padding))
    before = int((layer.store.tier != DROPPED).sum())
    rows = rows_of(2, 40, padding)
    layer.decode(cut(call, 30, 40), rows)
    after = layer.store.tier
    assert int((after != DROPPED).sum()) == before + 2 * 2 * 10
    size = layer.kv_bytes(rows)
    assert size.payload == 4 * 8 * (before + 40)
    assert (size.scales, size.scores) == (0, 0)
    assert size.full == 4 * 8 * 2 * (40 + 33)
    if storage == "packed":
        assert size.total == sum(tensor.nbytes for tensor in layer.tensors())


@pytest.mark.parametrize("name", METHODS)
def test_in_a_model_both_storages_agree(name):
    model, mask, ids = tiny_llama(num_hidden_layers=2), mask_of(34, [34, 20]), ids_of(34, 2)
    at, results = positions_of(mask), []
    for storage in ("simulated", "packed"):
        with torch.inference_mode(), compress(model, METHODS[name](0.5, window=4), storage=storage) as session:
            model(ids[:, :30], attention_mask=mask[:, :30], position_ids=at[:, :30])
            cache = session.cache
            rest = {"attention_mask": mask, "position_ids": at[:, 30:], "past_key_values": cache.hf}
            results.append((model(ids[:, 30:], **rest).logits, cache.kv_bytes(), cache.tokens()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][2]["pruned"] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EqualBudget(keep=1.1), "keep is 1.1; allowed are 0 to 1"),
        (lambda: EqualBudget(keep=-0.1), "keep is -0.1"),
        (lambda: EqualBudget(keep=float("nan")), "keep is nan"),
        (lambda: Coverage(mass=2), "mass is 2; allowed are 0 to 1"),
        (lambda: Coverage(mass=-1), "mass is -1"),
        (lambda: Coverage(window=0), "window is 0; at least the newest token must be kept"),
        (lambda: EqualBudget(window=-5), "window is -5"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_and_labels():
    assert baseline("equal-budget") is EqualBudget
    assert baseline("coverage") is Coverage
    assert "25" in EqualBudget(keep=0.25).label
    assert "99.5" in Coverage(mass=0.995).label
    with pytest.raises(ValueError, match="unknown baseline 'none'; allowed are int4, kivi, "):
        baseline("none")


alphas = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1e9]), st.floats(0.01, 3))


@pytest.mark.parametrize("divisor", ["position", "length"])
@given(alphas, st.integers(1, 40), st.integers(1, 30), st.integers(0, 39), st.integers(0, 99))
def test_a_threshold_keeps_what_reaches_it(divisor, alpha, tokens, window, padded, seed):
    call, padding, kind = random_call(tokens=tokens, seed=seed), (0, min(padded, tokens - 1)), Significance()
    kept = kept_of(Threshold(alpha=alpha, divisor=divisor, window=window), call, padding)
    for row, head, hidden, significance in each_head(call, padding, kind):
        assert not bool(kept[row, head, :hidden].any()), "padding"
        for index, value in enumerate(significance):
            over = index + 1 if divisor == "position" else len(significance)
            reached = np.float32(value) * np.float32(over) >= np.float32(alpha)
            recent = index >= len(significance) - window
            assert bool(kept[row, head, hidden + index]) == bool(recent or reached)


def test_divisors_differ_by_how_far_a_token_is():
    """Over the position, early tokens are pruned first."""
    call = random_call(tokens=30)
    call.query.zero_()
    kind = Significance("last", 1)
    early = kept_of(Threshold(alpha=0.5, window=1, significance=kind), call)[0, 0].tolist()
    assert early == [False] * 14 + [True] * 16, "each token has 1/30"
    assert bool(kept_of(Threshold(alpha=0.5, divisor="length", window=1, significance=kind), call).all())


FITTED = {"position": Threshold(window=4), "length": Threshold(window=4, divisor="length"),
          "equal": EqualBudget(window=4), "coverage": Coverage(window=4)}  # fmt: skip
PROMPTS = [random_call(tokens=50, seed=seed) for seed in range(3)]


def pruned_of(method, calls, padding=None):
    hidden = 0 if padding is None else sum(padding)
    own = sum(2 * call.key.shape[0] * call.key.shape[2] - 2 * hidden for call in calls)
    return own - sum(int(kept_of(method, call, padding).sum()) for call in calls)


@pytest.mark.parametrize("padding", [None, (0, 17)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.333, 0.6])
@pytest.mark.parametrize("name", FITTED)
def test_fitted_prunes_the_share(name, share, padding):
    """To one token a layer; an equal budget rounds in each of the four heads of a layer."""
    fitted = FITTED[name].fitted([prompt_of(call, padding) for call in PROMPTS], share)
    tokens = 3 * 2 * (100 if padding is None else 83)
    assert type(fitted) is type(FITTED[name])
    assert fitted.window == 4
    assert pruned_of(fitted, PROMPTS, padding) == pytest.approx(share * tokens, abs=6 if name == "equal" else 3)


@pytest.mark.parametrize("name", FITTED)
def test_a_share_beyond_the_window_prunes_next_to_all_of_the_rest(name):
    fitted = FITTED[name].fitted([prompt_of(call) for call in PROMPTS], 0.99)
    left = 3 * 4 * (50 - 4) - pruned_of(fitted, PROMPTS)
    assert left <= (3 * 4 if name == "coverage" else 3), "some mass, however little, is one token in each head"


@pytest.mark.parametrize("name", FITTED)
def test_prompts_within_the_window_are_kept_whole_at_any_share(name):
    calls = [random_call(tokens=4, seed=seed) for seed in range(2)]
    fitted = FITTED[name].fitted([prompt_of(call) for call in calls], 0.5)
    assert pruned_of(fitted, calls) == 0


def test_a_share_is_a_budget_once_it_is_fitted():
    method = AtShare(Threshold(window=4), 0.25, "threshold")
    assert method.label == "threshold, 25 % pruned"
    with pytest.raises(ValueError, match="threshold, 25 % pruned: fit it to prompts first, with fitted_to"):
        method.layer(place_of(), "simulated")
    prompts = [prompt_of(call) for call in PROMPTS]
    assert method.fitted_to(prompts) == Threshold(window=4).fitted(prompts, 0.25)
    assert Threshold().fitted_to(prompts) == Threshold()


@pytest.mark.parametrize("share", [-0.1, 1, float("nan")])
def test_shares_that_leave_nothing_are_refused(share):
    with pytest.raises(ValueError, match=f"share is {share}; allowed are 0 to below 1"):
        AtShare(EqualBudget(), share, "equal")


def test_bad_divisors_are_named():
    with pytest.raises(ValueError, match="divisor is 'N'; allowed are position, length"):
        Threshold(divisor="N")
    assert Threshold(alpha=0.0123456).label == "threshold 0.0123/position"
