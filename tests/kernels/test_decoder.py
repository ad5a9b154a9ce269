"""What lies between a decoder's matrix products, against the torch twins."""

import pytest
import torch
from diffkv_repro.kernels import decoder
from paged_helpers import DEVICE, assert_close

from diffkv_repro.engine import ops

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
KINDS = list(TOLERANCE)


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    monkeypatch.setattr(ops, "uses_triton", lambda tensor: False)


def normal(*size, kind, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(kind).to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 63, 64, 257])
def test_add_norm_is_the_twin_s(size, kind):
    hidden, delta, weight = (normal(*shape, size, kind=kind, seed=i) for i, shape in enumerate([(2, 3), (2, 3), ()]))
    hidden[0, 0] = 0  # a row of nothing
    for added in (delta, None):
        total, normed = decoder.add_norm_triton(hidden, added, weight, 1e-5)
        right_total, right = ops.add_norm(hidden, added, weight, 1e-5)
        assert torch.equal(total, right_total)
        assert_close("normed", normed, right.double(), TOLERANCE[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (7, 1, 64), (6, 2, 80), (8, 8, 128)])
def test_rotate_is_the_twin_s_for_steps_and_prompts(heads, kv_heads, head_dim, kind):
    cos, sin = (normal(50, head_dim, kind=torch.float32, seed=seed).clamp(-1, 1) for seed in (1, 2))
    for lead, positions in (((3,), torch.tensor([0, 49, 7])), ((2, 5), torch.arange(5)[None])):
        whole = normal(*lead, heads + 2 * kv_heads, head_dim, kind=kind)
        query, key, value = whole.split([heads, kv_heads, kv_heads], dim=-2)
        given = (query, key, cos, sin, positions.to(DEVICE))
        before = value.clone()
        for name, seen, right in zip(("query", "key"), decoder.rotate_triton(*given), ops.rotate(*given), strict=True):
            assert seen.is_contiguous()
            assert_close(name, seen, right.double(), TOLERANCE[kind])
        assert torch.equal(value, before)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_the_twin_s(kind):
    for size in (1, 63, 1025):
        gate_up = 3 * normal(2, 2 * size, kind=kind)
        gate_up[0, 0], gate_up[1, 0] = -60000 if kind == torch.float16 else -1e5, 50
        assert_close("gated", decoder.gated_triton(gate_up), ops.gated(gate_up).double(), TOLERANCE[kind])


def test_no_rows_are_no_launch():
    hidden = torch.zeros(0, 64, device=DEVICE)
    total, normed = decoder.add_norm_triton(hidden, None, torch.ones(64, device=DEVICE), 1e-5)
    assert total.shape == normed.shape == (0, 64)
    assert decoder.gated_triton(hidden).shape == (0, 32)
