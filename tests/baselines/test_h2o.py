"""H2O against plain loops over full score matrices: who stays after the prompt, and who goes at each step."""

import math

import pytest
import torch
from cache_helpers import cut, ids_of, mask_of, prompt_of, rows_of
from dropper_checks import call_of, decoded, of_rows, prefilled
from tiny import tiny_llama

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.h2o import H2O, accumulated_scores, highest
from diffkv_repro.cache import compress

HEADS, KV_HEADS, DIM = 6, 2, 8


def kept_columns(layer, row=0):
    return [set(tier.ge(0).nonzero().flatten().tolist()) for tier in layer.store.tier[row]]


def naive(call, prompt, budget, recent):
    """Kept columns of each KV head after the prompt, then after every step, and the outputs, by the definition."""
    group, tokens = HEADS // KV_HEADS, call.key.shape[2]
    query, key, value = (t[0].double() for t in (call.query, call.key, call.value))

    def attend(head, at, columns):
        logits = [float(query[head, at] @ key[head // group, c]) * call.scale for c in columns]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        return {c: w / sum(weights) for c, w in zip(columns, weights, strict=True)}

    history, outputs = [], torch.zeros(HEADS, tokens - prompt, DIM, dtype=torch.float64)
    for kv_head in range(KV_HEADS):
        heads = range(kv_head * group, (kv_head + 1) * group)
        received = dict.fromkeys(range(tokens), 0.0)
        for head in heads:
            for at in range(prompt):
                for column, score in attend(head, at, range(at + 1)).items():
                    received[column] += score
        older = sorted(range(prompt - recent), key=lambda c: -received[c])
        kept = set(range(max(prompt - recent, 0), prompt)) | set(older[: budget - recent])
        states = [set(kept)]
        for at in range(prompt, tokens):
            if len(kept) >= budget:
                kept.remove(min((c for c in kept if c <= at - recent), key=lambda c: received[c]))
            kept.add(at)
            for head in heads:
                scores = attend(head, at, sorted(kept))
                for column, score in scores.items():
                    received[column] += score
                    outputs[head, at - prompt] += score * value[kv_head, column]
            states.append(set(kept))
        history.append(states)
    return history, outputs


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_equal_to_plain_loops_in_prompt_and_generation(storage, keep):
    prompt, tokens = 21, 33
    call = call_of(tokens)
    budget = round(prompt * keep)
    history, outputs = naive(call, prompt, budget, max(1, round(budget / 2)))
    layer = prefilled(H2O(keep=keep), call, prompt, storage=storage)
    assert kept_columns(layer) == [states[0] for states in history]
    for step, at in enumerate(range(prompt, tokens), start=1):
        output = layer.decode(cut(call, at, at + 1), rows_of(len(call.key), at + 1))
        assert kept_columns(layer) == [states[step] for states in history]
        torch.testing.assert_close(output[0, :, 0].double(), outputs[:, step - 1], atol=1e-5, rtol=1e-4)
        assert layer.tier_counts(rows_of(len(call.key), at + 1)) == {"K16V16": [budget] * KV_HEADS}


def test_accumulated_scores_do_not_depend_on_blocks():
    call = call_of(37)
    logits = (call.query @ call.key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT * call.scale).double()
    logits.masked_fill_(torch.ones(37, 37, dtype=torch.bool).triu(1), -torch.inf)
    expected = logits.softmax(dim=-1).sum(dim=2)
    for block in (1, 8, 64):
        found = accumulated_scores(prompt_of(call), block)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_highest_counts_and_breaks_ties_by_position():
    values = torch.tensor([[[1.0, 3.0, 3.0, 0.0, 3.0]]])
    among = torch.tensor([[[True, True, True, True, False]]])
    assert highest(values, among, torch.tensor([1])).tolist() == [[[False, True, False, False, False]]]
    assert highest(values, among, torch.tensor([3])).tolist() == [[[True, True, True, False, False]]]
    assert highest(values, among, torch.tensor([9])).sum() == 4
    assert highest(values, among, torch.tensor([0])).sum() == 0


def test_a_fixed_budget_fills_up_before_anything_is_dropped():
    call = call_of(20)
    layer = prefilled(H2O(budget=8, recent=0.25), call, 5)
    decoded(layer, cut(call, 0, 8), 5)
    assert kept_columns(layer) == [set(range(8))] * KV_HEADS
    decoded(layer, call, 8)
    assert layer.tier_counts(None) == {"K16V16": [8, 8]}
    assert all({18, 19} <= kept for kept in kept_columns(layer)), "two tokens are recent"


@pytest.mark.parametrize("recent", [0.0, 1.0])
def test_all_heavy_and_all_recent(recent):
    call = call_of(24)
    layer = prefilled(H2O(keep=0.5, recent=recent), call, 16)
    decoded(layer, call, 16)
    assert layer.tier_counts(None) == {"K16V16": [8, 8]}
    if recent:
        assert kept_columns(layer) == [set(range(16, 24))] * KV_HEADS


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_the_shortest_prompts(prompt):
    call = call_of(prompt + 3)
    layer = prefilled(H2O(keep=0.5), call, prompt)
    output = decoded(layer, call, prompt)
    assert layer.tier_counts(None) == {"K16V16": [max(1, round(prompt / 2))] * KV_HEADS}
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_a_padded_row_is_as_it_is_alone(storage):
    call, padding = call_of(30, batch=2), torch.tensor([0, 7])
    layer = prefilled(H2O(), call, 22, padding, storage)
    output = decoded(layer, call, 22, padding)
    for row, hidden in enumerate(padding.tolist()):
        alone = cut(of_rows(call, [row]), hidden, 30)
        one = prefilled(H2O(), alone, 22 - hidden, storage=storage)
        expected = decoded(one, alone, 22 - hidden)
        torch.testing.assert_close(output[row], expected[0], atol=1e-5, rtol=1e-4)
        assert kept_columns(layer, row) == [{c + hidden for c in kept} for kept in kept_columns(one)]


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_many_tokens_at_once_are_as_one_by_one(storage):
    call = call_of(30, batch=2)
    layers = [prefilled(H2O(), call, 20, storage=storage) for _ in range(2)]
    one, many = decoded(layers[0], call, 20), decoded(layers[1], call, 20, sizes=[1, 6, 3])
    torch.testing.assert_close(one, many)
    assert kept_columns(layers[0]) == kept_columns(layers[1])


def test_bytes_are_what_is_allocated():
    call, padding = call_of(70, batch=2), torch.tensor([0, 9])
    layer = prefilled(H2O(), call, 60, padding, "packed")
    decoded(layer, call, 60, padding)
    size = layer.kv_bytes(rows_of(len(call.key), 70, padding))
    assert size.total == sum(tensor.nbytes for tensor in layer.tensors())
    stored = KV_HEADS * (30 + round(51 / 2))
    assert size.payload == stored * 4 * DIM
    assert size.scores == stored * 4 * HEADS // KV_HEADS


def test_selected_sequences_go_on_apart():
    call = call_of(28, batch=2)
    layer = prefilled(H2O(), call, 20)
    layer.select(torch.tensor([1, 1, 0]))
    swapped = of_rows(call, [1, 1, 0])
    expected = decoded(prefilled(H2O(), swapped, 20), swapped, 20)
    torch.testing.assert_close(decoded(layer, swapped, 20), expected)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_generation_with_beams_and_padding(storage):
    model = tiny_llama()
    ids, mask = ids_of(18, 2), mask_of(18, [18, 13])
    with compress(model, H2O(keep=0.5), storage=storage) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0)
    counts = [layer["K16V16"] for layer in session.cache.tier_counts()]
    assert counts == [[2 * (9 + 6)] * 2] * 3, "two beams of a budget of 9 and of 6 (half of 13, to even)"
    assert session.cache.reads == 3 * 5


def test_parameters():
    assert baseline("h2o") is H2O
    assert H2O(keep=0.25).label == "H2O 25 %"
    assert H2O(budget=64).label == "H2O 64 tokens"
    for wrong in ({"keep": 1.5}, {"keep": -0.1}, {"recent": 2}, {"budget": 0}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(ValueError, match=f"{name} is {value}; allowed"):
            H2O(**wrong)
