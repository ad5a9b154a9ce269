"""Output, rows and received scores of a prompt equal those of a full softmax, token by token."""

import dataclasses

import numpy as np
import pytest
import torch
from cache_helpers import naive_output, naive_weights, prompt_of, random_call

SHAPES = {
    "one head": {"kv_heads": 1, "group": 1},
    "each query head its own KV head": {"kv_heads": 3, "group": 1},
    "three query heads a KV head": {"kv_heads": 2, "group": 3},
    "odd head_dim": {"kv_heads": 1, "group": 7, "head_dim": 5},
    "sliding window": {"window": 5},
    "sliding window of one": {"window": 1},
    "soft-capped": {"softcap": 1.5},
    "both": {"window": 4, "softcap": 0.8, "kv_heads": 1, "group": 2},
}
PADDINGS = {"no padding": None, "padded": (0, 5), "padding of zero": (0, 0), "all but one token": (16, 2)}


def compare(seen, expected, atol=2e-6):
    np.testing.assert_allclose(seen.double().numpy(), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_a_full_softmax(shape, padding):
    call, hidden = random_call(**SHAPES[shape]), PADDINGS[padding]
    weights = naive_weights(call, hidden)
    prompt = prompt_of(call, hidden)
    compare(prompt.output(), naive_output(call, weights))
    compare(prompt.received, strictly_later(weights))
    compare(prompt.output(), naive_output(call, weights))
    for queries in (1, 4, 17, 40):
        compare(prompt.rows(queries), weights[:, :, -min(queries, 17) :])


def strictly_later(weights):
    received = np.zeros(weights.shape[:3])
    for query in range(weights.shape[2]):
        for key in range(query):
            received[:, :, key] += weights[:, :, query, key]
    return received


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300])
def test_equal_at_lengths_around_a_block(tokens):
    call = random_call(batch=1, kv_heads=1, group=2, tokens=tokens, head_dim=4)
    weights, prompt = naive_weights(call), prompt_of(call)
    compare(prompt.received, strictly_later(weights), atol=1e-5)
    compare(prompt.output(), naive_output(call, weights))
    compare(prompt.rows(3), weights[:, :, -3:])


def test_the_output_is_the_same_before_and_after_the_statistics():
    prompt = prompt_of(random_call())
    before = prompt.output()
    _ = prompt.received
    torch.testing.assert_close(prompt.output(), before)


def test_padding_gets_and_gives_nothing():
    prompt = prompt_of(random_call(), (3, 9))
    for row, count in enumerate((3, 9)):
        assert not bool(prompt.received[row, :, :count].any())
        assert not bool(prompt.rows(17)[row, :, :count].any())
        assert not bool(prompt.rows(17)[row, :, :, :count].any())
        assert not bool(prompt.output()[row, :, :count].any())
    assert prompt.valid.tolist() == [[column >= count for column in range(17)] for count in (3, 9)]


def test_what_stands_at_padding_does_not_matter():
    call, hidden = random_call(), (4, 0)
    other = dataclasses.replace(call, query=call.query.clone(), key=call.key.clone(), value=call.value.clone())
    for tensor in (other.query, other.key, other.value):
        tensor[0, :, :4] = 1e4
    one, two = prompt_of(call, hidden), prompt_of(other, hidden)
    assert torch.equal(one.received, two.received)
    assert torch.equal(one.rows(9), two.rows(9))
    assert torch.equal(one.output(), two.output())


def test_each_query_gives_one_in_all():
    prompt = prompt_of(random_call(tokens=33), (0, 8))
    sums = prompt.rows(33).sum(dim=-1)
    torch.testing.assert_close(sums[0], torch.ones_like(sums[0]))
    torch.testing.assert_close(sums[1, :, 8:], torch.ones_like(sums[1, :, 8:]))


def test_statistics_are_computed_once_and_only_when_asked_for(monkeypatch):
    import diffkv_repro.attention_stats.prompt as module

    calls, real = [], module.blocked_attention
    monkeypatch.setattr(module, "blocked_attention", lambda *args, **options: calls.append(1) or real(*args, **options))
    prompt = prompt_of(random_call())
    prompt.output(), prompt.rows(5)
    assert calls == []
    assert prompt.received is prompt.received
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_prompts_are_scored_in_float32(dtype):
    call = random_call()
    narrow = dataclasses.replace(call, **{name: getattr(call, name).to(dtype) for name in ("query", "key", "value")})
    prompt = prompt_of(narrow, (0, 3))
    weights = naive_weights(narrow, (0, 3))
    assert prompt.received.dtype == prompt.rows(3).dtype == torch.float32
    assert prompt.output().dtype == dtype
    compare(prompt.rows(6), weights[:, :, -6:], atol=1e-5)
    compare(prompt.received, strictly_later(weights), atol=1e-5)
    np.testing.assert_allclose(prompt.output().double(), naive_output(narrow, weights), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_logits_do_not_overflow(dtype):
    call = random_call(sharpness=60)
    narrow = dataclasses.replace(call, **{name: getattr(call, name).to(dtype) for name in ("query", "key", "value")})
    for hidden in (None, (0, 3)):
        prompt = prompt_of(narrow, hidden)
        for tensor in (prompt.output(), prompt.received, prompt.rows(5)):
            assert bool(torch.isfinite(tensor).all())
