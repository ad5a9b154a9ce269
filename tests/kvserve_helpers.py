"""Caches to encode: of any shape and dtype, with hostile numbers, and what a profile needs beside them."""

import torch
from hypothesis import strategies as st

from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.heads import HeadScores
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.transform_state import AffineMaps

LARGEST = 65504.0
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KINDS = ["normal", "constant", "zero", "largest", "subnormal", "far", "outlier channel"]


def layout_of(layers=2, kv_heads=3, head_dim=16, dtype=torch.float16, **about):
    return KVLayout(layers, kv_heads, head_dim, dtype, **about)


def block(shape, kind, generator):
    """[heads, tokens, channels] in float32."""
    noise = torch.randn(shape, generator=generator)
    if kind == "constant":
        return torch.full(shape, 3.14159)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "largest":
        return torch.where(noise > 0, LARGEST, -LARGEST)
    if kind == "subnormal":
        return noise * 1e-7
    if kind == "far":
        return 30_000 + noise
    if kind == "outlier channel":
        noise[..., 0] += 50
    return noise


def kv_of(layout, tokens, kind="normal", seed=0, start=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.kv_heads, tokens, layout.head_dim)
    pairs = [[block(shape, kind, generator).to(layout.dtype) for _ in range(2)] for _ in range(layout.layers)]
    return KV.of(pairs, start)


def assets_of(layout, tokens, seed=0, kv=None):
    generator = torch.Generator().manual_seed(seed)
    heads = torch.rand(layout.layers, layout.kv_heads, generator=generator).tolist()
    return Assets(
        heads=HeadScores(tuple(map(tuple, heads)), "mean-attention", "random", layout.model),
        token_scores=[torch.rand(layout.kv_heads, tokens, generator=generator) for _ in range(layout.layers)],
        affine=None if kv is None else AffineMaps.fit([kv], layout),
    )


@st.composite
def caches(draw, most_tokens=70):
    """A layout and a cache of it."""
    layout = layout_of(
        draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 8, 20, 64])),
        draw(st.sampled_from(DTYPES)),
    )  # fmt: skip
    tokens = draw(st.sampled_from([1, 2, 31, 33, most_tokens]) | st.integers(1, most_tokens))
    kind, start = draw(st.sampled_from(KINDS)), draw(st.sampled_from([0, 7]))
    return layout, kv_of(layout, tokens, kind, draw(st.integers(0, 99)), start)


def error_of(got, want):
    """Largest absolute difference of two caches, in float64."""
    pairs = zip(got.layers, want.layers, strict=True)
    parts = [(a, b) for x, y in pairs for a, b in ((x.key, y.key), (x.value, y.value))]
    return max((a.double() - b.double()).abs().max().item() for a, b in parts)


def same(got, want):
    return all(
        torch.equal(a.key, b.key) and torch.equal(a.value, b.value) and a.key.dtype == b.key.dtype
        for a, b in zip(got.layers, want.layers, strict=True)
    )


def sent(profile, kv, layout, assets=None):
    """Over the wire and back."""
    frame = profile.encode(kv, layout, assets=assets)
    data = frame.to_bytes()
    assert len(data) == frame.nbytes
    assert 0 <= frame.code_bytes < frame.nbytes
    arrived = Frame.from_bytes(data, layout, assets=assets)
    assert (arrived.nbytes, arrived.code_bytes) == (frame.nbytes, frame.code_bytes)
    return arrived.decode()
