"""Attention over pages: against float64 sums over the dequantised tokens, in every shape, and against transformers."""

import pytest
import torch
from cache_helpers import ids_of
from diffkv_repro.kernels.decode_triton import decode_attention_triton
from paged_helpers import DEVICE, assert_close, empty_view, filled_view, mixed_tiers, moved, random_rows
from tiny import tiny_llama
from transformers.models.llama.modeling_llama import eager_attention_forward

from diffkv_repro.diffkv import paged_ops, reference, reference_attention
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.paged_view import KeyBias, PagedView
from diffkv_repro.models import intercept_attention
from diffkv_repro.models.zoo import load_model

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def cache_of(tiers, head_dim, tokens, *, batch=3, kv_heads=2, seed=0, hard=True, spread=1.0):
    """A cache with requests of ``tokens``, 20 and 1 tokens, some pruned, and one head with none at all."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (random_rows(batch, kv_heads, tokens, head_dim, seed=seed + side) for side in (1, 2))
    if not hard:
        key, value = (torch.randn(key.shape, generator=generator).to(DEVICE) * spread for _ in range(2))
    # Rows of 65504 make the softmax a choice of one token; most heads are to have a real mixture.
    key.clamp_(-8, 8)
    count = len(tiers.split())
    tier = mixed_tiers(batch, kv_heads, tokens, count, lengths=[tokens, min(20, tokens), 1][:batch], seed=seed)
    tier[:, :, 0] = 0
    tier[0, 1] = -1
    view, rows, _ = filled_view(key, value, tier, tiers, seed=seed)
    return view, rows


def check(view, rows, query, *, tolerance=2e-3, newest=None, bias=None, **options):
    """Output and scores of the kernel against float64 sums; every element of the output is written."""
    twin, kernel = moved(view, DEVICE), moved(view, DEVICE)
    given = {"layer": 1, "requests": rows, "scale": query.shape[2] ** -0.5, "newest": newest, "bias": bias}
    expected = reference_attention.decode_attention(twin, query.double(), **given)
    out = torch.full(query.shape, torch.nan, device=DEVICE)
    seen = decode_attention_triton(kernel, query, out=out, **given, **options)
    assert seen.data_ptr() == out.data_ptr()
    assert_close("output", seen, expected, tolerance)
    words_before, words = view.pool.view(torch.float32), kernel.pool.view(torch.float32)
    expected_words = twin.pool.view(torch.float32)
    changed = twin.pool.view(torch.int32) != view.pool.view(torch.int32)
    changed |= kernel.pool.view(torch.int32) != view.pool.view(torch.int32)
    assert_close("scores", (words - words_before)[changed], (expected_words - words_before)[changed], tolerance)
    return kernel


# Every head size, every number of query heads a KV head, every number of bits on either side.
SHAPES = [
    ("K8V4 K4V2", 64, 3, torch.float16, 65), ("K8V4 K4V2", 128, 4, torch.bfloat16, 257),
    ("K4V8 K2V4", 80, 1, torch.float16, 64), ("K8V2 K2V1", 96, 2, torch.bfloat16, 63),
    ("K4V2:2/4 K8V4:1/2", 64, 8, torch.float16, 100), ("K16V16 K16V4", 80, 5, torch.bfloat16, 65),
    ("K16V1 K1V16", 256, 7, torch.float16, 40), ("K8V4 K4V2 K2V2", 128, 6, torch.float32, 65),
    ("K8V8", 64, 1, torch.float16, 1), ("K4V2:4/2 K2V2:2/8", 128, 3, torch.float32, 40),
    ("K4V4 K1V1", 16, 2, torch.float32, 33),
]  # fmt: skip


@pytest.mark.parametrize(("tiers", "head_dim", "group", "dtype", "tokens"), SHAPES)
def test_attention_is_that_over_the_dequantised_tokens(tiers, head_dim, group, dtype, tokens):
    view, rows = cache_of(tiers, head_dim, tokens, hard=False)
    query = torch.randn(3, 2 * group, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    newest = torch.tensor([[0, 1], [2, -1], [5, 0]], dtype=torch.int32, device=DEVICE)
    check(view, rows, query, newest=newest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_at_the_ends_of_half_precision(dtype):
    view, rows = cache_of("K8V4 K4V2", 64, 40)
    check(view, rows, torch.randn(3, 4, 64, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 300.0])
def test_sizes_of_queries_and_values_do_not_matter(size):
    """Products of probabilities and scales leave FP16's range on either side unless they are brought into it."""
    view, rows = cache_of("K8V4 K4V2", 64, 40, hard=False, spread=size)
    query = torch.randn(3, 4, 64, device=DEVICE) / size
    check(view, rows, query.clamp(-6e4, 6e4).half() if size < 1e-4 else query)
    check(view, rows, torch.zeros(3, 4, 64, dtype=torch.float16, device=DEVICE))


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("block", [16, 64])
def test_a_split_sequence_gets_the_same_scores_in_every_tier(splits, block):
    """The official code rescales scores of low tokens by the wrong part, and reads what other blocks still change."""
    view, rows = cache_of("K8V4 K4V2", 64, 150, hard=False)
    query = 2 * torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    first = check(view, rows, query, splits=splits, block=block, tolerance=1e-3)
    again = check(view, rows, query, splits=splits, block=block, tolerance=1e-3)
    assert torch.equal(first.pool, again.pool)


def test_scores_stay_when_they_are_not_asked_for():
    view, rows = cache_of("K8V4 K4V2", 64, 40, hard=False)
    before = view.pool.clone()
    query = torch.randn(3, 4, 64, device=DEVICE).half()
    options = {"layer": 1, "requests": rows, "scale": 0.125, "update_scores": False}
    seen = decode_attention_triton(view, query, **options)
    assert torch.equal(view.pool, before)
    assert_close("output", seen, reference_attention.decode_attention(view, query.double(), **options))


def test_the_largest_probability_over_the_query_heads_counts():
    """One token, one query head each: every score grows by 1, own score excepted where asked."""
    key = torch.randn(2, 2, 1, 64, device=DEVICE)
    view, rows, scores = filled_view(key, key, torch.zeros(2, 2, 1, dtype=torch.int8, device=DEVICE), "K8V4")
    newest = torch.tensor([[-1, 0], [0, -1]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 4, 64, device=DEVICE).half()
    decode_attention_triton(view, query, layer=1, requests=rows, scale=0.125, newest=newest)
    for row, head in torch.ones(2, 2).nonzero().tolist():
        found = reference.read_rows(view, 0, int(rows[row]), 1, head, torch.zeros(1, dtype=torch.long, device=DEVICE))[
            2
        ]
        expected = scores[row, head] + (1 if int(newest[row, head]) < 0 else 0)
        torch.testing.assert_close(found.cpu(), expected.cpu())


def test_requests_that_are_not_there_and_an_empty_cache():
    view, rows = cache_of("K8V4 K4V2", 64, 20, hard=False)
    query = torch.randn(3, 4, 64, device=DEVICE).half()
    rows[1] = -1
    check(view, rows, query)
    view.lengths.zero_()
    out = torch.full_like(query, torch.nan)
    decode_attention_triton(view, query, layer=1, requests=rows, scale=0.1, out=out)
    assert bool((out == 0).all())
    assert decode_attention_triton(view, query[:0], layer=1, requests=rows[:0], scale=0.1).shape == (0, 4, 64)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (256, torch.float32)])
def test_keys_get_their_bias_back(head_dim, dtype):
    """Also one that is many times as large as the keys, as in Qwen2.5."""
    view, rows = cache_of("K8V4 K4V2", head_dim, 40, hard=False)
    angles = torch.rand(40, head_dim // 2) * 6
    bias = 20 * torch.randn(2, 2, head_dim)
    bias = KeyBias(bias.to(DEVICE), torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE))
    query = torch.randn(3, 4, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    check(view, rows, query, bias=bias)


def test_pages_beyond_two_gigabytes():
    """A page id times the page size does not fit into 32 bits; memory that is never touched costs nothing."""
    small, rows = cache_of("K8V4 K4V2", 128, 30, hard=False)
    layouts = tuple(PageLayout(own.precision, 128, small.pool.shape[1]) for own in small.layouts)
    first = 2**31 // small.pool.shape[1] + 1
    size = (first + len(small.pool), small.pool.shape[1])
    pool = torch.empty_strided(size, (size[1], 1), dtype=torch.uint8, device=DEVICE)
    pool[first:] = small.pool
    far = PagedView(pool, small.tables + first, small.lengths, layouts)
    query = torch.randn(3, 4, 128, device=DEVICE).half()
    options = {"layer": 1, "requests": rows, "scale": 0.1}
    assert torch.equal(decode_attention_triton(far, query, **options), decode_attention_triton(small, query, **options))
    assert torch.equal(pool[first:], small.pool)

    key = torch.randn(3, 2, 30, 128, device=DEVICE)
    tier = mixed_tiers(3, 2, 30, 2)
    slots, _ = reference.partition(tier, 2)
    scores = torch.rand(tier.shape, device=DEVICE)
    plan = torch.full((3, 2, 8), -1, dtype=torch.int32, device=DEVICE)
    plan[..., 0], plan[..., 5], plan[..., 6], plan[..., 7] = 1, 1, 1, 2
    columns = torch.full((3,), 30, dtype=torch.int32, device=DEVICE)
    for view in (far, small):
        paged_ops.pack(view, key, key, tier, slots, scores, rows, layer=1)
        paged_ops.append(view, key[:, :, 0], key[:, :, 1], plan, rows, columns, layer=1)
    assert torch.equal(pool[first:], small.pool)


def test_shapes_that_do_not_fit_are_refused():
    view = empty_view()
    options = {"layer": 0, "requests": torch.zeros(1, dtype=torch.int32, device=DEVICE), "scale": 1.0}
    for operation in (decode_attention_triton, reference_attention.decode_attention):
        with pytest.raises(ValueError, match="query has 32 channels, the pages 64"):
            operation(view, torch.zeros(1, 4, 32, device=DEVICE), **options)
        with pytest.raises(ValueError, match="3 query heads are no multiple of 2 KV heads"):
            operation(view, torch.zeros(1, 3, 64, device=DEVICE), **options)


def model_of(name):
    """The model, some of its layers, and tokens of a text."""
    if name == "tiny":
        return tiny_llama(heads=6, kv_heads=2, head_dim=64), range(3), ids_of(50)
    loaded = load_model(name, device="cpu", dtype=torch.float32)
    text = "The page of a cache holds keys and values of one head; its tier says how many bits each of them gets. " * 3
    return loaded.model, (0, 7, 29), loaded.tokenizer(text, return_tensors="pt").input_ids[:, :50]


@pytest.mark.parametrize(
    ("name", "tiers"), [("tiny", "K8V4 K4V2"), ("tiny", "K16V16 K8V8"), ("smollm2-135m", "K8V4 K4V2")]
)
def test_attention_is_that_of_transformers_on_the_dequantised_cache(name, tiers):
    model, layers, ids = model_of(name)
    calls = {}

    def attend(call):
        calls[call.layer] = call
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (side.repeat_interleave(group, dim=1) for side in (call.key, call.value))
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, key, value, is_causal=True, scale=call.scale
        )

    with torch.inference_mode(), intercept_attention(model, attend):
        model(ids)
    for index in layers:
        call = calls[index]
        key, value, query = call.key.clone(), call.value.clone(), call.query[:, :, -1].half()
        kv_heads, tokens = key.shape[1:3]
        tier = mixed_tiers(1, kv_heads, tokens, 2, seed=index, device=CPU).clamp_min(0)
        view, rows, _ = filled_view(key, value, tier, tiers)
        for head in range(kv_heads):
            for which in range(2):
                own = (tier[0, head] == which).nonzero()[:, 0]
                found = reference.read_rows(view, which, int(rows[0]), 1, head, torch.arange(len(own)))
                key[0, head, own], value[0, head, own] = found[:2]
        expected, _ = eager_attention_forward(
            model.model.layers[index].self_attn, query[:, :, None].float(), key, value, None, scaling=call.scale
        )
        on_device = moved(view, DEVICE)
        seen = decode_attention_triton(on_device, query.to(DEVICE), layer=1, requests=rows.to(DEVICE), scale=call.scale)
        assert_close(f"layer {index}", seen, expected[:, 0])
        if DEVICE.type == "cuda" and call.key.shape[-1] in (64, 128, 256):
            options = {"layer": 1, "requests": rows.to(DEVICE), "scale": call.scale, "kernel": "cuda"}
            found = paged_ops.decode_attention(moved(view, DEVICE), query.to(DEVICE), **options)
            assert_close(f"layer {index}, CUDA kernel", found, expected[:, 0])
