"""SnapKV against plain loops over full score matrices."""

import pytest
import torch
from cache_helpers import cut, ids_of, mask_of, rows_of
from dropper_checks import call_of, kept_columns, of_rows, prefilled
from tiny import tiny_llama

from diffkv_repro.baselines import baseline
from diffkv_repro.baselines.snapkv import SnapKV
from diffkv_repro.cache import compress
from diffkv_repro.models.hf import AttentionCall

HEADS, KV_HEADS, DIM = 6, 2, 8
SMALL = {"window": 5, "kernel": 3}


def full_scores(call):
    """Scores of a whole prompt, [heads, queries, keys]."""
    tokens = call.key.shape[2]
    logits = call.query[0].double() @ call.key[0].double().repeat_interleave(HEADS // KV_HEADS, dim=0).mT * call.scale
    return logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)


def naive(call, method):
    """Columns that each KV head keeps, by the definition."""
    tokens = call.key.shape[2]
    older = tokens - method.window
    scores, group = full_scores(call), HEADS // KV_HEADS
    kept = []
    for kv_head in range(KV_HEADS):
        pooled = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            votes = [sum(float(scores[head, q, c]) for q in range(older, tokens)) for c in range(older)]
            reach = method.kernel // 2
            near = [votes[max(c - reach, 0) : c + reach + 1] for c in range(older)]
            pooled.append([max(n) if method.pooling == "max" else sum(n) / method.kernel for n in near])
        agreed = [sum(c) / group if method.group == "mean" else max(c) for c in zip(*pooled, strict=True)]
        best = sorted(range(older), key=lambda c: -agreed[c])[: max(round(tokens * method.keep) - method.window, 0)]
        kept.append(sorted([*best, *range(older, tokens)]))
    return kept


@pytest.mark.parametrize("storage", ["simulated", "packed"])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["max", "average"])
def test_equal_to_plain_loops(pooling, group, keep, storage):
    call = call_of(40)
    method = SnapKV(keep=keep, pooling=pooling, group=group, **SMALL)
    layer = prefilled(method, call, 40, storage=storage)
    assert kept_columns(layer) == naive(call, method)
    assert layer.tier_counts(None) == {"K16V16": [round(40 * keep)] * KV_HEADS}


def test_a_worked_example():
    """One query sees a needle at column 6: with a kernel of 3 its neighbours are kept with it."""
    key = torch.zeros(1, KV_HEADS, 16, DIM)
    key[:, :, 6, 0] = 8.0
    query = torch.zeros(1, HEADS, 16, DIM)
    query[:, :, 13, 0] = 8.0  # within the window; other queries look evenly
    call = AttentionCall(0, query, key, torch.ones_like(key), 1.0, None, None)
    kept = kept_columns(prefilled(SnapKV(keep=8 / 16, window=5, kernel=3), call, 16))
    assert kept == [[5, 6, 7, 11, 12, 13, 14, 15]] * KV_HEADS
    assert kept_columns(prefilled(SnapKV(keep=6 / 16, window=5, kernel=1), call, 16))[0] == [6, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("prompt", [1, 4, 5])
def test_prompts_no_longer_than_the_window_lose_nothing(prompt):
    call = call_of(prompt + 1)
    layer = prefilled(SnapKV(keep=0.1, **SMALL), call, prompt)
    assert layer.tier_counts(None) == {"K16V16": [prompt] * KV_HEADS}
    assert bool(layer.decode(cut(call, prompt, prompt + 1), rows_of(len(call.key), prompt + 1)).isfinite().all())


def test_the_window_stays_where_the_share_is_less():
    assert kept_columns(prefilled(SnapKV(keep=0.1, **SMALL), call_of(20), 20)) == [list(range(15, 20))] * KV_HEADS


def test_generation_keeps_everything_and_attends_to_what_is_kept():
    call, group = call_of(34), HEADS // KV_HEADS
    layer = prefilled(SnapKV(keep=0.5, **SMALL), call, 30)
    kept = kept_columns(layer)
    output = layer.decode(cut(call, 30, 34), rows_of(len(call.key), 34))
    assert kept_columns(layer) == [[*columns, 30, 31, 32, 33] for columns in kept]
    for head in range(HEADS):
        key, value = (t[0, head // group].double() for t in (call.key, call.value))
        for step in range(4):
            seen = [*kept[head // group], *range(30, 31 + step)]
            weights = (call.query[0, head, 30 + step].double() @ key[seen].T * call.scale).softmax(dim=-1)
            torch.testing.assert_close(output[0, head, step].double(), weights @ value[seen], atol=1e-5, rtol=1e-4)


def test_many_tokens_at_once_are_as_one_by_one():
    call = call_of(30, batch=2)
    one, many = (prefilled(SnapKV(**SMALL), call, 24) for _ in range(2))
    outputs = [one.decode(cut(call, at, at + 1), rows_of(len(call.key), at + 1)) for at in range(24, 30)]
    torch.testing.assert_close(many.decode(cut(call, 24, 30), rows_of(len(call.key), 30)), torch.cat(outputs, dim=2))


@pytest.mark.parametrize("pooling", ["max", "average"])
@pytest.mark.parametrize("hidden", [1, 8, 21, 27])
def test_a_padded_row_is_as_it_is_alone(hidden, pooling):
    """Up to a row that is shorter than the window, and one of a single token."""
    call, padding = call_of(28, batch=2), torch.tensor([0, hidden])
    method = SnapKV(pooling=pooling, **SMALL)
    both = prefilled(method, call, 28, padding)
    for row, own in enumerate(padding.tolist()):
        alone = cut(of_rows(call, [row]), own, 28)
        kept = kept_columns(prefilled(method, alone, 28 - own))
        assert kept_columns(both, row) == [[c + own for c in columns] for columns in kept]


def test_bytes_are_what_is_allocated():
    call, padding = call_of(60, batch=2), torch.tensor([0, 9])
    layer = prefilled(SnapKV(**SMALL), call, 60, padding, "packed")
    size = layer.kv_bytes(rows_of(len(call.key), 60, padding))
    assert size.total == sum(tensor.nbytes for tensor in layer.tensors())
    assert size.payload == KV_HEADS * (30 + round(51 / 2)) * 4 * DIM
    assert size.full == KV_HEADS * (60 + 51) * 4 * DIM


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_generation_with_beams_and_padding(storage):
    model = tiny_llama()
    ids, mask = ids_of(18, 2), mask_of(18, [18, 13])
    with compress(model, SnapKV(keep=0.5, window=4), storage=storage) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, pad_token_id=0)
    counts = [layer["K16V16"] for layer in session.cache.tier_counts()]
    assert counts == [[2 * (9 + 5 + 6 + 5)] * 2] * 3, "two beams of half a prompt and 5 tokens each"
    assert session.cache.reads == 3 * 5


def test_parameters():
    assert baseline("snapkv") is SnapKV
    method = SnapKV(keep=0.25)
    assert (method.window, method.kernel, method.pooling, method.group) == (32, 7, "max", "mean")
    assert method.label == "SnapKV 25 %"
    for name, value in (("keep", 1.5), ("window", 0), ("kernel", 4), ("pooling", "mean"), ("group", "sum")):
        with pytest.raises(ValueError, match=f"{name} is '?{value}"):
            SnapKV(**{name: value})
