"""DuoAttention: what retrieval and streaming heads hold, and that attention is over just that."""

import pytest
import torch
from cache_helpers import cut, ids_of, layout_of, mask_of, rows_of
from dropper_checks import call_of, decoded, kept_columns, of_rows, prefilled
from tiny import tiny_gemma3, tiny_llama

from diffkv_repro.attention_stats.head_classes import retrieval_scores
from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.duoattention import DuoAttention
from diffkv_repro.cache import compress
from diffkv_repro.models import LoadedModel, attention_layout

HEADS, KV_HEADS, DIM = 6, 2, 8
MIXED = DuoAttention(((True, False),), sink=3, recent=5)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("prompt", [1, 4, 7, 8, 9, 15])
def test_sinks_and_recent_tokens_at_every_step(prompt, storage):
    call = call_of(20)
    layer = prefilled(MIXED, call, prompt, storage=storage)
    for length in range(prompt, 21):
        if length > prompt:
            output = layer.decode(cut(call, length - 1, length), rows_of(len(call.key), length))
        streaming = [c for c in range(length) if c < 3 or c >= length - 5]
        assert kept_columns(layer) == [list(range(length)), streaming]
        for head in range(HEADS if length > prompt else 0):
            seen = streaming if head >= HEADS // KV_HEADS else list(range(length))
            key, value = (t[0, head // (HEADS // KV_HEADS), seen].double() for t in (call.key, call.value))
            weights = (call.query[0, head, length - 1].double() @ key.T * call.scale).softmax(dim=-1)
            torch.testing.assert_close(output[0, head, 0].double(), weights @ value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("hidden", [2, 6, 13, 15])
def test_a_padded_row_is_as_it_is_alone(hidden):
    """Its sinks are its own first tokens, not the padding."""
    call, padding = call_of(24, batch=2), torch.tensor([0, hidden])
    layer = prefilled(MIXED, call, 16, padding)
    output = decoded(layer, call, 16, padding)
    for row, own in enumerate(padding.tolist()):
        alone = cut(of_rows(call, [row]), own, 24)
        one = prefilled(MIXED, alone, 16 - own)
        torch.testing.assert_close(output[row], decoded(one, alone, 16 - own)[0], atol=1e-5, rtol=1e-4)
        assert kept_columns(layer, row) == [[c + own for c in columns] for columns in kept_columns(one)]


def test_many_tokens_at_once_are_as_one_by_one():
    call = call_of(24, batch=2)
    one, many = (prefilled(MIXED, call, 10) for _ in range(2))
    torch.testing.assert_close(decoded(one, call, 10), decoded(many, call, 10, sizes=[3, 11]))
    assert kept_columns(one) == kept_columns(many)


def test_bytes_are_what_is_allocated():
    call, padding = call_of(50, batch=2), torch.tensor([0, 9])
    layer = prefilled(MIXED, call, 40, padding, "packed")
    decoded(layer, call, 40, padding)
    size = layer.kv_bytes(rows_of(len(call.key), 50, padding))
    assert size.total == sum(tensor.nbytes for tensor in layer.tensors())
    assert size.payload == (50 + 41 + 2 * 8) * 4 * DIM
    assert size.scores == 0


def test_selected_sequences_go_on_apart():
    call = call_of(24, batch=2)
    layer = prefilled(MIXED, call, 16)
    layer.select(torch.tensor([1, 1, 0]))
    swapped = of_rows(call, [1, 1, 0])
    expected = decoded(prefilled(MIXED, swapped, 16), swapped, 16)
    torch.testing.assert_close(decoded(layer, swapped, 16), expected)


def test_heads_are_classed_for_a_model():
    model = tiny_llama(heads=6, kv_heads=3)
    method = DuoAttention.for_model(model, keep=1 / 3, sink=2, recent=4, seed=1, length=20)
    scores = retrieval_scores(model, length=20, seed=1)
    threshold = sorted(scores.flatten())[-3]
    assert method.retrieval == tuple(tuple(row) for row in (scores >= threshold).tolist())
    assert (method.sink, method.recent) == (2, 4)
    loaded = LoadedModel("tiny", model, None, attention_layout(model), "float32", "none")
    assert DuoAttention.for_model(loaded, keep=1 / 3, sink=2, recent=4, seed=1, length=20) == method
    assert not any(map(any, DuoAttention.for_model(model, keep=0, length=20).retrieval))


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_generation_with_beams_and_padding(storage):
    model = tiny_llama()
    method = DuoAttention.for_model(model, sink=2, recent=4, length=20)
    ids, mask = ids_of(18, 2), mask_of(18, [18, 13])
    with compress(model, method, storage=storage) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0)
    counts = [layer["K16V16"] for layer in session.cache.tier_counts()]
    assert counts == [[2 * (23 + 18) if retrieves else 4 * 6 for retrieves in row] for row in method.retrieval]


def test_sliding_layers_are_left_alone():
    model = tiny_gemma3()
    method = DuoAttention.for_model(model, keep=1.0, length=20)
    assert method.retrieval == ((), (True,), ())
    with compress(model, method) as session:
        model.generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert session.cache.tokens()["pruned"] == 0


def test_parameters():
    assert baseline("duoattention") is DuoAttention
    half = DuoAttention([[True, False], [False, True]])
    assert (half.sink, half.recent, half.label) == (64, 256, "DuoAttention 50 %")
    assert half.retrieval == ((True, False), (False, True))
    with pytest.raises(ValueError, match="retrieval is for 2 layers, the model has 1"):
        half.check(layout_of())
    with pytest.raises(ValueError, match="retrieval has 1 heads in layer 0, the model 2"):
        DuoAttention(((True,),)).check(layout_of())
    for name, value in (("sink", -1), ("recent", 0)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            DuoAttention(((True,),), **{name: value})
    for wrong, text in (((), "must be"), (((),), "must be"), (((0.7,),), "holds 0.7; allowed are True and False")):
        with pytest.raises(ValueError, match=text):
            DuoAttention(wrong)
    with pytest.raises(ValueError, match="keep is 2; allowed"):
        DuoAttention.for_model(tiny_llama(), keep=2)
