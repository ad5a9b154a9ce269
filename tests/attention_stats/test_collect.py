"""Blocked statistics equal the naive ones from output_attentions=True, whatever the shape, padding or block."""

import numpy as np
import pytest
import torch
from tiny import tiny_gemma2, tiny_gemma3, tiny_llama, tiny_qwen2

from diffkv_repro.attention_stats import collect
from diffkv_repro.attention_stats.blocks import blocked_attention
from diffkv_repro.models import intercept_attention

MODELS = {
    "llama ratio 1": lambda: tiny_llama(heads=4, kv_heads=4),
    "llama ratio 3": lambda: tiny_llama(heads=6, kv_heads=2, head_dim=10),
    "qwen2 ratio 7 with key bias": tiny_qwen2,
    "gemma3 sliding layers": tiny_gemma3,
    "gemma2 soft-capped": tiny_gemma2,
}


def ids_of(tokens, sequences=1, seed=0):
    return torch.randint(3, 97, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(tokens, lengths):
    mask = torch.zeros(len(lengths), tokens, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
    return mask


def naive(model, input_ids, mask):
    """Sums over strictly later queries, and all scores, straight from the model's own score matrices."""
    model.set_attn_implementation("eager")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.inference_mode():
        out = model.base_model(input_ids=input_ids, attention_mask=mask, position_ids=positions, output_attentions=True)
    scores = torch.stack(out.attentions, dim=1).double()  # sequence, layer, head, query, key
    scores = scores * mask[:, None, None, :, None]
    return scores.tril(-1).sum(dim=3).numpy(), scores.numpy()


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_models_own_scores(name, padded, block):
    model = MODELS[name]()
    # In float64 a mismatch is a mistake, not two float32 products rounding apart. Under padding the eager path
    # turns float64 into NaN (its lowest float64 overflows the float32 softmax), so there float32 has to do.
    precise = not padded
    model = model.double() if precise else model
    atol = 1e-12 if precise else 1e-6
    tokens = 37
    input_ids = ids_of(tokens, sequences=2)
    mask = left_padded(tokens, [tokens, 21] if padded else [tokens, tokens])
    stats = collect(model, input_ids, attention_mask=mask, block=block, rows=(20, -1))
    received, scores = naive(model, input_ids, mask)
    valid = np.broadcast_to(mask.bool().numpy()[:, None, None, :], received.shape)
    np.testing.assert_allclose(stats.received.values[valid], received[valid], rtol=1e-5, atol=atol)
    assert np.isnan(stats.received.values[~valid]).all()
    for index, row in enumerate((20, tokens - 1)):
        shown = stats.rows.values[:, :, :, index]
        np.testing.assert_allclose(shown[valid], scores[:, :, :, row][valid], rtol=1e-5, atol=atol)
    later = mask.flip(1).cumsum(1).flip(1).numpy() - 1
    average = stats.average.values
    expected = received / np.where(later > 0, later, 1)[:, None, None, :]
    counted = valid & (later > 0)[:, None, None, :]
    np.testing.assert_allclose(average[counted], expected[counted], rtol=1e-5, atol=atol)
    assert np.isnan(average[:, :, :, -1]).all(), "the last token has no later query"


@pytest.mark.parametrize("name", MODELS)
def test_the_blocked_attention_computes_what_the_model_computes(name):
    """Its output feeds the next layer, and that of the last layer is seen here alone."""
    model, input_ids = MODELS[name](), ids_of(37)
    model.set_attn_implementation("eager")  # the default leaves Gemma 2's soft-capping out
    with torch.inference_mode():
        own = model(input_ids).logits
        with intercept_attention(model, lambda call: blocked_attention(call, block=8).output):
            blocked = model(input_ids).logits
    torch.testing.assert_close(blocked, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_depends_on_what_memory_held_before(name, monkeypatch):
    model, input_ids, mask = MODELS[name](), ids_of(37, sequences=2), left_padded(37, [37, 21])
    clean = collect(model, input_ids, attention_mask=mask, block=8)
    fresh = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: fresh(*size, **options).fill_(torch.nan))
    poisoned = collect(model, input_ids, attention_mask=mask, block=8)
    np.testing.assert_array_equal(poisoned.received, clean.received)


def test_nothing_is_said_of_padding():
    mask = left_padded(37, [37, 21])
    stats = collect(tiny_llama(), ids_of(37, sequences=2), attention_mask=mask, rows=(3, 30))
    for array in (stats.received, stats.key_norm, stats.value_norm, stats.average, stats.significance):
        assert np.isnan(array.isel(sequence=1, token=slice(0, 16))).all()
    assert np.isnan(stats.rows.isel(sequence=1).sel(query=3)).all(), "a padded query has no scores"
    assert float(stats.rows.isel(sequence=1, layer=0, head=0).sel(query=30).sum()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model, input_ids = tiny_llama(), ids_of(37)
    exact = collect(model, input_ids).received
    rounded = collect(model.to(dtype), input_ids).received
    assert np.isfinite(rounded).all()
    np.testing.assert_allclose(rounded.sum("token"), exact.sum("token"), rtol=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_equals_cpu(name):
    model, input_ids, mask = MODELS[name](), ids_of(37, sequences=2), left_padded(37, [37, 21])
    on_cpu = collect(model, input_ids, attention_mask=mask, block=8, rows=(20,))
    on_cuda = collect(model.cuda(), input_ids, attention_mask=mask, block=8, rows=(20,))
    for array in ("received", "key_norm", "value_norm", "rows"):
        np.testing.assert_allclose(getattr(on_cuda, array), getattr(on_cpu, array), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_watching_does_not_change_what_the_model_computes(name):
    model, input_ids = MODELS[name](), ids_of(33)
    with torch.inference_mode():
        before = model(input_ids).logits
        collect(model, input_ids, block=8)
        after = model(input_ids).logits
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", MODELS)
def test_equal_in_float32_too(name):
    """Rounding is absolute in the logits, so scores far below the uniform 1/N get room for it."""
    model, input_ids = MODELS[name](), ids_of(37)
    stats = collect(model, input_ids, block=16)
    received, _ = naive(model, input_ids, torch.ones_like(input_ids))
    np.testing.assert_allclose(stats.received.values, received, rtol=1e-5, atol=1e-5)


def test_significance_is_the_maximum_over_the_query_heads_of_a_kv_head():
    stats = collect(tiny_qwen2(), ids_of(19, sequences=2))
    by_hand = stats.average.values.reshape(2, 3, 2, 7, 19).max(axis=3)
    assert stats.significance.dims == ("sequence", "layer", "kv_head", "token")
    np.testing.assert_array_equal(stats.significance.values, by_hand)


def test_norms_are_those_of_the_cache():
    model, input_ids = tiny_llama(), ids_of(23)
    stats = collect(model, input_ids)
    with torch.inference_mode():
        cache = model(input_ids, use_cache=True).past_key_values
    for layer, (keys, values, *_) in enumerate(cache):
        np.testing.assert_allclose(stats.key_norm.values[:, layer], keys.norm(dim=-1).numpy(), rtol=1e-4)
        np.testing.assert_allclose(stats.value_norm.values[:, layer], values.norm(dim=-1).numpy(), rtol=1e-4)


def test_scores_of_all_tokens_add_up_to_one_per_query():
    stats = collect(tiny_llama(), ids_of(31), rows=range(31))
    np.testing.assert_allclose(stats.rows.sum("token").values, 1.0, rtol=1e-5)
    own = np.einsum("slhqq->slhq", stats.rows.values)
    np.testing.assert_allclose(stats.received.sum("token").values, 31 - own.sum(-1), rtol=1e-5)


def test_two_tokens_and_a_block_longer_than_the_text():
    stats = collect(tiny_llama(), ids_of(2), block=1000)
    assert np.isfinite(stats.received.values).all()
    assert stats.later.values.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": ids_of(1)}, "1 tokens has no later query"),
        ({"input_ids": ids_of(257)}, "257 tokens is longer than the model's context of 256"),
        ({"input_ids": ids_of(9)[0]}, r"input_ids has shape \(9,\)"),
        ({"input_ids": ids_of(9), "block": 0}, "block is 0"),
        ({"input_ids": ids_of(9), "rows": (9,)}, r"rows \[9\] are outside"),
        ({"input_ids": ids_of(9), "attention_mask": left_padded(8, [8])}, "attention_mask has shape"),
        ({"input_ids": ids_of(9), "attention_mask": left_padded(9, [5]).flip(1)}, "only padding on the left"),
        ({"input_ids": ids_of(9), "attention_mask": left_padded(9, [1])}, "1 tokens has no later query"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        collect(tiny_llama(), **arguments)
