"""PyramidKV: budgets by hand, and SnapKV's choice within them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cache_helpers import cut, ids_of, layout_of, mask_of, place_of, prompt_of, random_call, rows_of
from tiny import tiny_gemma3, tiny_llama

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.pyramidkv import PyramidKV
from diffkv_repro.baselines.snapkv import SnapKV
from diffkv_repro.cache import compress
from diffkv_repro.models.hf import LayerAttention

FULL, SLIDING = LayerAttention("full"), LayerAttention("sliding", 16)


def budgets(method, tokens, layers=4, kinds=None):
    """Tokens besides the window, of each layer with full attention."""
    layout = replace(layout_of(), layers=kinds or (FULL,) * layers)
    full = [index for index, layer in enumerate(layout.layers) if layer.kind == "full"]
    return [int(method.voted(torch.tensor([tokens]), replace(place_of(index), layout=layout))) for index in full]


def prefilled(method, call, layer, padding=None, storage="simulated"):
    cache = method.layer(place_of(layer, layers=4), storage)
    rows = rows_of(len(call.key), call.key.shape[2], padding)
    cache.prefill(prompt_of(call, padding), rows)
    return cache, rows


def test_budgets_by_hand():
    # Half of 1000 is 500: 492 besides the window of 8. 492 // 20 = 24 in the highest layer, 984 - 24 = 960 in the
    # lowest, and equal steps of 312 between them.
    assert budgets(PyramidKV(keep=0.5), 1000) == [960, 648, 336, 24]
    # Steps of 7.5: pairs are rounded about the mean of 30.
    assert budgets(PyramidKV(keep=0.5, window=2, beta=2), 64, layers=5) == [45, 38, 30, 22, 15]
    assert budgets(PyramidKV(keep=0.5, beta=1), 100) == [42] * 4
    assert budgets(PyramidKV(keep=0.5), 100, layers=1) == [42]


def test_the_lowest_layer_cannot_have_more_than_there_is():
    assert budgets(PyramidKV(keep=0.9), 1000, layers=3) == [992, 892, 792]
    assert budgets(PyramidKV(keep=1.0), 1000) == [992] * 4


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("tokens", [1, 9, 30, 101, 4096])
@pytest.mark.parametrize("keep", [0.0, 0.12, 0.5, 0.8])
def test_the_mean_is_kept_exactly_and_budgets_fall(keep, tokens, layers):
    found = budgets(PyramidKV(keep=keep), tokens, layers)
    mean = max(round(tokens * keep) - 8, 0)
    assert sum(found) == mean * layers
    assert found == sorted(found, reverse=True)
    assert found[-1] >= 0
    assert found[0] <= max(tokens - 8, 0)
    if found[0] < tokens - 8:
        assert found[-1] == mean // 20 or layers == 1
    steps = [upper - lower for upper, lower in pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 2, "an arithmetic sequence, but for rounding"


def test_sliding_layers_take_no_part():
    kinds = (SLIDING, FULL, SLIDING, FULL, FULL)
    assert budgets(PyramidKV(keep=0.5), 1000, 5, kinds) == budgets(PyramidKV(keep=0.5), 1000, 3)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_each_layer_keeps_what_snapkv_would_with_its_budget(storage):
    call = random_call(batch=1, tokens=60)
    method = PyramidKV(keep=0.5)
    assert budgets(method, 60) == [43, 29, 15, 1]
    for layer, count in enumerate(budgets(method, 60)):
        found, _ = prefilled(method, call, layer, storage=storage)
        snapkv, _ = prefilled(SnapKV(keep=(count + 8) / 60, window=8), call, layer)
        assert torch.equal(found.store.tier, snapkv.store.tier)
        assert found.tier_counts(None) == {"K16V16": [count + 8] * 2}


def test_a_padded_row_is_as_it_is_alone():
    call, padding = random_call(tokens=60, batch=3), torch.tensor([0, 13, 55])
    for layer in range(4):
        both, _ = prefilled(PyramidKV(), call, layer, padding)
        for row, own in enumerate(padding.tolist()):
            single = replace(call, query=call.query[[row]], key=call.key[[row]], value=call.value[[row]])
            one, _ = prefilled(PyramidKV(), cut(single, own, 60), layer)
            assert torch.equal(both.store.tier[row, :, own:], one.store.tier[0])
            assert bool((both.store.tier[row, :, :own] < 0).all())


def test_bytes_are_what_is_allocated():
    call, padding = random_call(tokens=60, batch=2), torch.tensor([0, 9])
    for layer in range(4):
        cache, rows = prefilled(PyramidKV(), call, layer, padding, "packed")
        size = cache.kv_bytes(rows)
        assert size.total == sum(tensor.nbytes for tensor in cache.tensors())


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_generation_with_beams_and_padding(storage):
    model = tiny_llama()
    ids, mask = ids_of(38, 2), mask_of(38, [38, 33])
    with compress(model, PyramidKV(keep=0.5), storage=storage) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0)
    counts = [layer["K16V16"][0] for layer in session.cache.tier_counts()]
    assert counts[0] > counts[1] > counts[2]
    assert sum(counts) == 3 * 2 * (19 + 16 + 2 * 5), "two beams; half of each prompt in the mean, and 5 tokens"


def test_one_token_prompts_and_sliding_layers_in_a_model():
    for model in (tiny_llama(), tiny_gemma3()):
        with compress(model, PyramidKV()) as session:
            model.generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert session.cache.tokens()["pruned"] == 0


def test_many_tokens_at_once_are_as_one_by_one():
    model = tiny_llama()
    ids = ids_of(40)
    logits = []
    for sizes in ([1] * 6, [6]):
        with torch.inference_mode(), compress(model, PyramidKV(), storage="simulated") as session:
            cache, at, parts = session.new_cache(), 34, []
            model(ids[:, :at], past_key_values=cache.hf)
            for size in sizes:
                parts.append(model(ids[:, at : at + size], past_key_values=cache.hf).logits)
                at += size
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_parameters():
    assert baseline("pyramidkv") is PyramidKV
    assert PyramidKV(keep=0.12).label == "PyramidKV 12 %"
    assert (PyramidKV().window, PyramidKV().kernel, PyramidKV().pooling, PyramidKV().beta) == (8, 7, "max", 20)
    with pytest.raises(ValueError, match="beta is 0; allowed"):
        PyramidKV(beta=0)
    with pytest.raises(ValueError, match="keep is 2; allowed"):
        PyramidKV(keep=2)
