"""What every quantising method must do, whatever it computes: checks that the tests of all of them run."""

from dataclasses import replace

import torch
from cache_helpers import cut, place_of, prompt_of, random_call, rows_of
from tiny import tiny_llama

from diffkv_repro.cache import compress
from diffkv_repro.models.rope import Rope

SHAPE = {"kv_heads": 2, "group": 3, "head_dim": 16}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def place(dtype=torch.float32, **shape):
    """A place in a layer of the tiny llama, with its rotary embedding."""
    shape = SHAPE | shape
    heads = shape["kv_heads"] * shape["group"]
    rope = Rope(tiny_llama(heads=heads, kv_heads=shape["kv_heads"], head_dim=shape["head_dim"]))
    return replace(place_of(dtype=dtype, **shape), rope=rope)


def call_of(tokens, batch=1, dtype=torch.float32, seed=0, **shape):
    call = random_call(batch=batch, tokens=tokens, seed=seed, **(SHAPE | shape))
    return replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))


def rows_at(call, columns, padding=None):
    return rows_of(call.key.shape[0], columns, padding)


def start(method, storage, call, prompt, padding=None, where=None):
    """A layer that holds the first ``prompt`` tokens of ``call``."""
    layer = method.layer(where or place(), storage)
    layer.prefill(prompt_of(cut(call, 0, prompt), padding), rows_at(call, prompt, padding))
    return layer


def go_on(layer, call, prompt, sizes, padding=None):
    """Decode runs of ``sizes`` tokens; output [batch, heads, sum of sizes, head_dim]."""
    outputs, at = [], prompt
    for size in sizes:
        outputs.append(layer.decode(cut(call, at, at + size), rows_at(call, at + size, padding)))
        at += size
    return torch.cat(outputs, dim=2)


def allocated(layer):
    return sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors())


def check_storages(method, prompt, tokens, padding=None, batch=1, dtype=torch.float32, **shape):
    """Simulated and packed give the same bits and report the same bytes, and those are the bytes that there are."""
    call, where = call_of(prompt + tokens, batch, dtype, **shape), place(dtype, **shape)
    simulated, packed = (start(method, kind, call, prompt, padding, where) for kind in ("simulated", "packed"))
    for at in range(prompt, prompt + tokens + 1):
        rows = rows_at(call, at, padding)
        count = packed.kv_bytes(rows)
        assert simulated.kv_bytes(rows) == count
        assert count.total == allocated(packed)
        assert simulated.tier_counts(rows) == packed.tier_counts(rows)
        stored = sum(sum(counts) for counts in packed.tier_counts(rows).values())
        assert count.full == 4 * stored * call.key.shape[-1]
        if at < prompt + tokens:
            one = cut(call, at, at + 1)
            outputs = [layer.decode(one, rows_at(call, at + 1, padding)) for layer in (simulated, packed)]
            assert torch.equal(*outputs)
            assert bool(outputs[0].isfinite().all())
    assert simulated.tensors() == []
    assert packed.reads == tokens


def check_runs(method, prompt, sizes, padding=None, batch=1, storage="simulated"):
    """Several tokens at once give what they give one by one."""
    call, where = call_of(prompt + sum(sizes), batch), place()
    single, several = (start(method, storage, call, prompt, padding, where) for _ in range(2))
    expected = go_on(single, call, prompt, [1] * sum(sizes), padding)
    assert torch.allclose(go_on(several, call, prompt, sizes, padding), expected, **CLOSE)
    rows = rows_at(call, prompt + sum(sizes), padding)
    assert several.kv_bytes(rows) == single.kv_bytes(rows)
    assert several.reads == single.reads == sum(sizes)


def check_padding(method, prompt, tokens, padding, storage="simulated"):
    """A sequence with padding on its left gives what it gives alone."""
    call, where = call_of(prompt + tokens, len(padding)), place()
    layer = start(method, storage, call, prompt, padding, where)
    together = go_on(layer, call, prompt, [1] * tokens, padding)
    for row, hidden in enumerate(padding):
        parts = (tensor[row : row + 1, :, hidden:] for tensor in (call.query, call.key, call.value))
        alone = replace(call, **dict(zip(("query", "key", "value"), parts, strict=True)))
        own = start(method, storage, alone, prompt - hidden, None, where)
        assert torch.allclose(together[row : row + 1], go_on(own, alone, prompt - hidden, [1] * tokens), **CLOSE)


def check_select(method, prompt, tokens, padding=(0, 5), storage="packed"):
    """Sequences that are reordered, repeated or let go, as beam search does, go on as if they had always been so."""
    order = torch.tensor([1, 1])
    call, where, padding = call_of(prompt + tokens + 3, 2), place(), torch.tensor(padding)
    parts = (tensor[order] for tensor in (call.query, call.key, call.value))
    chosen = replace(call, **dict(zip(("query", "key", "value"), parts, strict=True)))
    layer = start(method, storage, call, prompt, padding, where)
    go_on(layer, call, prompt, [1] * tokens, padding)
    layer.select(order)
    expected = start(method, storage, chosen, prompt, padding[order], where)
    go_on(expected, chosen, prompt, [1] * tokens, padding[order])
    outputs = [go_on(each, chosen, prompt + tokens, [1, 1, 1], padding[order]) for each in (layer, expected)]
    assert torch.allclose(*outputs, **CLOSE)
    rows = rows_at(chosen, prompt + tokens + 3, padding[order])
    if storage == "packed":
        assert layer.kv_bytes(rows).total == allocated(layer)
    assert layer.kv_bytes(rows).payload == expected.kv_bytes(rows).payload


def check_generates(method, model=None, **options):
    """A padded batch through ``generate``, the same in both storages; the cache really answered."""
    model = model or tiny_llama()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    texts = []
    for storage in ("simulated", "packed"):
        with torch.no_grad(), compress(model, method, storage=storage) as session:
            found = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, **options)
        assert session.cache.reads > 0
        texts.append(found)
    assert torch.equal(*texts)
    assert session.cache.kv_bytes().total == sum(allocated(layer) for layer in session.cache.layers)


def constant_call(tokens, value=3.7):
    """Every channel of every token alike: nothing has a range."""
    call = call_of(tokens)
    return replace(call, key=torch.full_like(call.key, value), value=torch.full_like(call.value, -value))
