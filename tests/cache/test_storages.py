"""Both storages give the same logits bit for bit, the same bytes and the same tiers, in any configuration."""

import random
from functools import cache

import pytest
import torch
from cache_helpers import ids_of, mask_of, positions_of
from tiny import tiny_llama, tiny_qwen2

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache import Uniform, compress
from diffkv_repro.core.precision import BITS, Precision
from diffkv_repro.diffkv import CompressionPolicy

MODELS = {
    "ratio 1": lambda: tiny_llama(heads=2, kv_heads=2, num_hidden_layers=2),
    "ratio 3": lambda: tiny_llama(heads=6, kv_heads=2, num_hidden_layers=1),
    "ratio 4, one KV head": lambda: tiny_llama(heads=4, kv_heads=1, num_hidden_layers=2),
    "ratio 7, key bias": lambda: tiny_qwen2(num_hidden_layers=1),
}
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
CONFIGURATIONS, CHUNK = 200, 10


@cache
def model_of(name, dtype):
    return MODELS[name]().to(dtype)


def random_precision(draw):
    groups = [1, 1, 2, 4, 8]
    return Precision(draw.choice(BITS), draw.choice(BITS), draw.choice(groups), draw.choice(groups))


def random_alphas(draw, tiers, layout):
    """Not increasing; sometimes equal, sometimes nothing at all, sometimes one for each head."""
    smallest, largest = draw.choice([(0.0, 0.1), (0.1, 2.0), (0.5, 2.0), (0.5, 4.0), (2.0, 30.0)])
    levels = sorted((draw.uniform(smallest, largest) for _ in range(tiers)), reverse=True)
    if draw.random() < 0.3:
        levels[-1] = 0.0
    if draw.random() < 0.3:
        layers, kv_heads = layout
        shares = [[draw.uniform(0, 1) for _ in range(kv_heads)] for _ in range(layers)]
        return [[[level * share for share in row] for row in shares] for level in levels]
    return levels


def random_method(draw, model):
    biased = model.config.model_type == "qwen2" and draw.random() < 0.5
    if draw.random() < 0.15:
        return Uniform(random_precision(draw), bias_free=biased)
    tiers = list(dict.fromkeys(random_precision(draw) for _ in range(draw.randint(1, 4))))
    own = draw.random() < 0.5
    kind = draw.choice([Significance(), Significance("last", draw.randint(1, 80), own_score=own)])
    layout = (model.config.num_hidden_layers, model.config.num_key_value_heads)
    return CompressionPolicy(
        tuple(tiers), tuple(random_alphas(draw, len(tiers), layout)), draw.randint(1, 20), kind,
        draw.choice(["position", "length"]),
        draw.choice(["algorithm-1", "two-minimum"]) if len(tiers) == 2 else "algorithm-1",
        draw.choice(["position", "length"]), draw.choice(["of-means", "each-step"]), biased,
    )  # fmt: skip


def run(model, method, storage, seed):
    """Logits of a prompt and of what follows, bytes and tiers at the end; the same random request for a seed."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, draw.choice([3, 50, 90])) for _ in range(draw.randint(1, 3))]
    prompt, more = max(lengths), draw.randint(0, 20)
    mask = mask_of(prompt + more, [length + more for length in lengths])
    ids, at = ids_of(prompt + more, len(lengths), seed), positions_of(mask)
    given = {"attention_mask": mask[:, :prompt]} if draw.random() < 0.9 or min(lengths) < prompt else {}
    logits, stop = [], prompt
    with compress(model, method, storage=storage) as session:
        logits.append(model(ids[:, :prompt], position_ids=at[:, :prompt], **given).logits)
        cache = session.cache
        while stop < prompt + more:
            if draw.random() < 0.2:
                rows = torch.tensor([draw.randrange(len(ids)) for _ in lengths])
                cache.hf.reorder_cache(rows)
                mask, ids, at = mask[rows], ids[rows], at[rows]
            start, stop = stop, min(prompt + more, stop + draw.choice([1, 1, 2, 7]))
            out = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=at[:, start:stop],
                past_key_values=cache.hf,
            )  # fmt: skip
            logits.append(out.logits)
    size = cache.kv_bytes()
    if storage == "packed":
        assert size.total == sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors())
    seen = sum(length + more for length in mask[:, :prompt].sum(dim=1).tolist())
    tokens = cache.tokens()
    assert sum(tokens.values()) == seen * model.config.num_key_value_heads * model.config.num_hidden_layers
    assert size.full == 4 * 16 * sum(tokens.values())
    return torch.cat(logits, dim=1), size, cache.tier_counts(), tokens["pruned"]


@pytest.mark.parametrize("first", range(0, CONFIGURATIONS, CHUNK))
def test_both_storages_are_equal_in_random_configurations(first):
    for seed in range(first, first + CHUNK):
        draw = random.Random(seed)
        model = model_of(draw.choice(list(MODELS)), draw.choice(DTYPES))
        method = random_method(draw, model)
        with torch.inference_mode():
            packed, simulated = (run(model, method, storage, seed) for storage in ("packed", "simulated"))
        assert bool(torch.isfinite(packed[0]).all()), f"configuration {seed}"
        assert torch.equal(packed[0], simulated[0]), f"configuration {seed}: {method}"
        assert packed[1:] == simulated[1:], f"configuration {seed}: {method}"
