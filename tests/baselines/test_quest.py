"""Quest against plain loops: bounds, pages, attention, and what is counted as read."""

import math
from dataclasses import replace

import dropper_checks
import pytest
import torch
from cache_helpers import cut, ids_of, mask_of, place_of, prompt_of, rows_of
from dropper_checks import call_of, decoded, of_rows
from tiny import tiny_gemma2, tiny_llama

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.quest import Quest
from diffkv_repro.cache import FullPrecision, compress
from diffkv_repro.models.hf import AttentionCall

HEADS, KV_HEADS, DIM = 6, 2, 8
SMALL = {"page": 4, "dense_layers": 0}


def prefilled(method, call, prompt, padding=None, storage="simulated", layer=0):
    return dropper_checks.prefilled(method, call, prompt, padding, storage, layer, layers=2)


def naive(call, prompt, method):
    """Outputs [heads, n, head_dim] of the tokens after the prompt, and the columns that each KV head reads."""
    group, tokens = HEADS // KV_HEADS, call.key.shape[2]
    query, key, value = (t[0].double() for t in (call.query, call.key, call.value))
    output, reads = torch.zeros(HEADS, tokens - prompt, DIM, dtype=torch.float64), []
    for at in range(prompt, tokens):
        pages = [range(first, min(first + method.page, at + 1)) for first in range(0, at + 1, method.page)]
        budget = method.budget or round(method.keep * (at + 1))
        count = max(3, sum(len(pages[-1]) + method.page * others <= budget for others in range(len(pages))))
        for kv_head in range(KV_HEADS):
            heads = range(kv_head * group, (kv_head + 1) * group)
            bounds = [
                max(
                    sum(max(float(query[h, at, d]) * float(key[kv_head, c, d]) for c in page) for d in range(DIM))
                    for h in heads
                )
                for page in pages[:-1]
            ]
            best = sorted(range(len(bounds)), key=lambda p: -bounds[p])[: count - 1]
            seen = [c for p in (*sorted(best), len(pages) - 1) for c in pages[p]]
            reads.append(seen)
            for head in heads:
                logits = [float(query[head, at] @ key[kv_head, c]) * call.scale for c in seen]
                if call.softcap is not None:
                    logits = [call.softcap * math.tanh(logit / call.softcap) for logit in logits]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                for c, weight in zip(seen, weights, strict=True):
                    output[head, at - prompt] += weight / sum(weights) * value[kv_head, c]
    return output, reads


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep": 0.3}, {"budget": 16}, {"keep": 0.8, "page": 1}])
def test_equal_to_plain_loops(options, softcap, storage):
    call, prompt, tokens = call_of(55, softcap=softcap), 41, 55
    method = Quest(**(SMALL | options))
    layer = prefilled(method, call, prompt, storage=storage)
    expected, reads = naive(call, prompt, method)
    found = decoded(layer, call, prompt)
    torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=1e-4)
    assert layer.loaded_tokens == sum(map(len, reads))
    assert layer.held_tokens == KV_HEADS * sum(range(prompt + 1, tokens + 1))
    assert layer.loaded_tokens < layer.held_tokens
    assert layer.reads == tokens - prompt


def test_a_worked_example():
    """Pages of two tokens go by their bounds: the first one is read, though the third one's best key scores higher."""
    key = torch.zeros(1, KV_HEADS, 9, DIM)
    key[0, :, 0, 0], key[0, :, 1, 1] = 3.0, 3.0  # for the query (1, 1) scores 3 and 3, bound 6
    key[0, :, 2, :2] = 2.5  # score and bound 5
    key[0, :, 4, :2] = 2.0  # score and bound 4
    key[0, :, 6, 0] = -9.0  # scores -9 and 0, bound 0
    value = torch.zeros_like(key)
    value[0, :, :, 0] = torch.arange(9.0)
    query = torch.zeros(1, HEADS, 9, DIM)
    query[..., :2] = 1.0
    call = AttentionCall(0, query, key, value, 1e-6, None, None)  # so little that attention is even
    output = decoded(prefilled(Quest(keep=0.0, page=2, dense_layers=0), call, 8), call, 8)
    torch.testing.assert_close(output[0, :, 0, 0], torch.full((HEADS,), (0 + 1 + 2 + 3 + 8) / 5), atol=1e-4, rtol=0)


def test_everything_is_kept_and_the_prompt_is_exact():
    call = call_of(45)
    layer = prefilled(Quest(keep=0.1, **SMALL), call, 40)
    decoded(layer, call, 40)
    assert layer.tier_counts(None) == {"K16V16": [45, 45]}


@pytest.mark.parametrize("method", [Quest(keep=1.0, **SMALL), Quest(budget=1000, **SMALL), Quest(keep=0.1, page=4)])
def test_reading_everything_is_full_attention(method):
    """By budget, and in the first two layers whatever the budget."""
    call = call_of(40, batch=2)
    padding = torch.tensor([0, 9])
    layer, full = (prefilled(m, call, 30, padding, layer=1) for m in (method, FullPrecision()))
    expected = decoded(full, call, 30, padding, sizes=[10])
    torch.testing.assert_close(decoded(layer, call, 30, padding), expected, atol=1e-5, rtol=1e-4)
    assert layer.loaded_tokens == layer.held_tokens == KV_HEADS * sum(2 * n - 9 for n in range(31, 41))


@pytest.mark.parametrize("prompt", [1, 2, 11])
def test_three_pages_are_always_read(prompt):
    call = call_of(12)
    layer = prefilled(Quest(keep=0.0, **SMALL), call, prompt)
    expected = decoded(prefilled(FullPrecision(), call, prompt), call, prompt)
    torch.testing.assert_close(decoded(layer, call, prompt), expected, atol=1e-5, rtol=1e-4)
    assert layer.loaded_tokens == layer.held_tokens


@pytest.mark.parametrize("shift", [1, 4, 17, 29])
def test_a_padded_row_is_as_it_is_alone(shift):
    call, padding = call_of(44, batch=2), torch.tensor([0, shift])
    layer = prefilled(Quest(**SMALL), call, 30, padding)
    output = decoded(layer, call, 30, padding, sizes=[4, 1, 9])
    loaded = 0
    for row, hidden in enumerate(padding.tolist()):
        alone = cut(of_rows(call, [row]), hidden, 44)
        one = prefilled(Quest(**SMALL), alone, 30 - hidden)
        torch.testing.assert_close(output[row], decoded(one, alone, 30 - hidden)[0], atol=1e-5, rtol=1e-4)
        loaded += one.loaded_tokens
    assert layer.loaded_tokens == loaded


def test_many_tokens_at_once_are_as_one_by_one():
    call = call_of(60, batch=2)
    one, many = (prefilled(Quest(keep=0.4, **SMALL), call, 30) for _ in range(2))
    expected = decoded(one, call, 30)
    torch.testing.assert_close(decoded(many, call, 30, sizes=[3, 17, 1, 9]), expected, atol=1e-5, rtol=1e-4)
    assert one.loaded_tokens == many.loaded_tokens
    for left, right in zip(one._tensors(), many._tensors(), strict=True):
        assert torch.equal(left[:, :, :8], right[:, :, :8])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_is_allocated(dtype, layer):
    call, padding = call_of(50, batch=2), torch.tensor([0, 9])
    cache = Quest(page=16, dense_layers=1).layer(place_of(layer, dtype, layers=2), "packed")
    cast = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
    cache.prefill(prompt_of(cut(cast, 0, 40), padding), rows_of(len(call.key), 40, padding))
    decoded(cache, cast, 40, padding)
    size = cache.kv_bytes(rows_of(len(call.key), 50, padding))
    assert size.total == sum(tensor.nbytes for tensor in cache.tensors())
    assert size.payload == size.full == KV_HEADS * (50 + 41) * 4 * DIM
    assert size.tables == (KV_HEADS * (4 + 3) * 4 * DIM if layer else 0), "two vectors of FP16 a page"
    assert size.padding > 0
    simulated = prefilled(Quest(), call, 40, padding)
    assert simulated.tensors() == []


def test_selected_sequences_go_on_apart():
    call, order, padding = call_of(44, batch=2), torch.tensor([1, 1, 0]), torch.tensor([0, 7])
    layer = prefilled(Quest(**SMALL), call, 30, padding)
    layer.select(order)
    swapped = of_rows(call, order)
    expected = decoded(prefilled(Quest(**SMALL), swapped, 30, padding[order]), swapped, 30, padding[order])
    torch.testing.assert_close(decoded(layer, swapped, 30, padding[order]), expected)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma2])
def test_generation_with_beams_and_padding(build, storage):
    model = build()
    ids, mask = ids_of(28, 2), mask_of(28, [28, 23])
    method = Quest(keep=0.3, page=2, dense_layers=1)
    with compress(model, method, storage=storage) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0)
    assert session.cache.tokens()["pruned"] == 0
    assert session.cache.reads == 3 * 5
    quest = session.cache.layers[1]
    assert 0.2 < quest.loaded_tokens / quest.held_tokens < 0.4
    assert session.plan[1] == "layer 1: Quest 30 %"
    assert ("dense" in session.plan[0]) == (session.layout.layers[0].kind == "full")


def test_parameters():
    assert baseline("quest") is Quest
    method = Quest()
    assert (method.keep, method.page, method.dense_layers, method.label) == (0.5, 16, 2, "Quest 50 %")
    assert Quest(budget=1024).label == "Quest 1024 tokens"
    for name, value in (("keep", 1.5), ("budget", 0), ("page", 0), ("dense_layers", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Quest(**{name: value})
    with pytest.raises(ValueError, match="unknown storage 'paged'"):
        prefilled(method, call_of(3), 3, storage="paged")
