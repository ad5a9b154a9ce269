"""What the tests of quantisers, caches and policies share: slow twins of the code, and small inputs for it."""

import math

import numpy as np
import torch

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import Place, Rows
from diffkv_repro.models.hf import AttentionCall, AttentionLayout, LayerAttention

CPU = torch.device("cpu")


def naive_quantise(row, levels):
    """Codes, scale, zero of one group of values, in plain numpy; the values that they stand for as float32."""
    row = np.asarray(row, dtype=np.float32)
    low, high = row.min(), row.max()
    zero = np.float16(low)
    if np.float32(zero) > low:
        zero = np.nextafter(zero, np.float16(-np.inf))
    step = np.float32(high - np.float32(zero)) / np.float32(levels - 1)
    if step > 65504:
        scale, zero = np.float16(65504), np.float16(-32752)
    else:
        scale = np.float16(step)
        if np.float32(scale) < step:
            scale = np.nextafter(scale, np.float16(np.inf))
    wide = np.float32(scale) if scale > 0 else np.float32(1)
    codes = np.clip(np.round((row - np.float32(zero)) / wide), 0, levels - 1)
    # One rounding for product and sum together, as a fused multiply-add has it: both fit into float64.
    values = (np.float64(zero) + codes.astype(np.float64) * np.float64(scale)).astype(np.float32)
    return codes.astype(np.uint8), scale, zero, values


def naive_codec(row, bits, groups=1):
    """What a stored float32 vector is when it is read again."""
    row = np.asarray(row, dtype=np.float32)
    if bits == 16:
        return row.astype(np.float16).astype(np.float32)
    return np.concatenate([naive_quantise(part, 2**bits)[3] for part in np.split(row, groups)])


def naive_weights(call, padding=None):
    """All scores [batch, heads, tokens, tokens] of a prompt in float64, one query after the other."""
    query, key = call.query.double().numpy(), call.key.double().numpy()
    batch, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    weights = np.zeros((batch, heads, tokens, tokens))
    for row, head, at in np.ndindex(batch, heads, tokens):
        first = 0 if padding is None else int(padding[row])
        start = first if call.window is None else max(first, at - call.window + 1)
        if at < first:
            continue
        logits = key[row, head // group, start : at + 1] @ query[row, head, at] * call.scale
        if call.softcap is not None:
            logits = np.tanh(logits / call.softcap) * call.softcap
        exponents = np.exp(logits - logits.max())
        weights[row, head, at, start : at + 1] = exponents / exponents.sum()
    return weights


def naive_output(call, weights):
    """Attention output [batch, heads, tokens, head_dim] of such scores."""
    group = call.query.shape[1] // call.key.shape[1]
    values = np.repeat(call.value.double().numpy(), group, axis=1)
    return weights @ values


def random_call(
    batch=2, kv_heads=2, group=3, tokens=17, head_dim=8, *, seed=0, window=None, softcap=None, layer=0, sharpness=1.5
):
    """A prompt of random queries, keys and values, uneven enough for scores to differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads):
        return torch.randn(batch, heads, tokens, head_dim, generator=generator)

    return AttentionCall(
        layer=layer, query=sharpness * normal(kv_heads * group), key=sharpness * normal(kv_heads),
        value=normal(kv_heads), scale=1 / math.sqrt(head_dim), window=window, softcap=softcap,
    )  # fmt: skip


def cut(call, start, stop):
    """The tokens ``start`` to ``stop`` of a call."""
    tensors = (tensor[:, :, start:stop] for tensor in (call.query, call.key, call.value))
    return AttentionCall(call.layer, *tensors, call.scale, call.window, call.softcap)


def prompt_of(call, padding=None):
    """A prompt with so many columns of padding in each sequence."""
    return PromptAttention(call, None if padding is None else torch.as_tensor(padding))


def rows_of(batch, columns, padding=None):
    """Padding and positions of a batch, as a model would pass them."""
    hidden = torch.zeros(batch, dtype=torch.long) if padding is None else torch.as_tensor(padding)
    positions = (torch.arange(columns)[None] - hidden[:, None]).clamp_min(0)
    return Rows(None if padding is None else hidden, positions)


def layout_of(*, kv_heads=2, group=3, head_dim=8, layers=1, max_positions=512):
    """A model of full-attention layers."""
    kinds = tuple(LayerAttention("full") for _ in range(layers))
    return AttentionLayout(kinds, kv_heads * group, kv_heads, head_dim, max_positions)


def place_of(layer=0, dtype=torch.float32, **shape):
    """A place in such a model."""
    return Place(layer, layout_of(**shape), dtype, CPU)


def ids_of(tokens, sequences=1, seed=0):
    """Random tokens of the tiny models."""
    return torch.randint(3, 97, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def mask_of(tokens, lengths):
    """Attention mask of sequences of these lengths, padded on the left."""
    return (torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]).long()


def positions_of(mask):
    """Position ids as ``generate`` makes them."""
    return (mask.cumsum(dim=1) - 1).clamp_min(0)
