"""The CUDA kernel of decode attention: compiled everywhere that NVRTC is, run where there is a GPU."""

import math

import paged_helpers
import pytest
import torch
from diffkv_repro.kernels import decode_cuda, nvrtc
from hypothesis import given
from hypothesis import strategies as st
from paged_helpers import filled_view, mixed_tiers, random_rows

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import reference_attention
from diffkv_repro.diffkv.layout import PageLayout

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layouts(tiers, head_dim=128, page_bytes=6784):
    return tuple(PageLayout(Precision.parse(name), head_dim, page_bytes) for name in tiers.split())


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize(
    ("tiers", "head_dim", "group"),
    [("K8V4 K4V2", 128, 4), ("K4V8 K2V4", 128, 5), ("FP16", 64, 3), ("K8V8 K2V2", 64, 8), ("K4V1", 256, 1)],
)
def test_compiles_ahead_of_time(arch, tiers, head_dim, group, tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(tmp_path))
    cluster = 4 if arch == "sm_90" else 1
    options = {"update_scores": True, "bfloat16": group == 5, "cluster": cluster}
    shape = decode_cuda.Shape.of(layouts(tiers, head_dim), group=group, **options)
    code = decode_cuda.compile_shape(shape, arch)
    assert code[:4] == b"\x7fELF"
    kept = list(tmp_path.rglob("*.cubin"))
    assert [path.read_bytes() for path in kept] == [code]
    assert decode_cuda.compile_shape(shape, arch) == code


@needs_nvrtc
def test_a_source_that_does_not_compile_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(tmp_path))
    with pytest.raises(nvrtc.CompileError, match="undefined_name"):
        nvrtc.compile_cubin("__global__ void f() { undefined_name; }", {}, "sm_90")
    assert not list(tmp_path.rglob("*.cubin"))


@given(
    tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=2),
    tiers=st.sampled_from(["K8V8 K4V2", "K8V4 K4V2", "K4V4 K4V1", "FP16 K2V2"]),
    warps=st.sampled_from([4, 8]),
    cluster=st.integers(1, 8),
)
def test_shared_memory_holds_what_any_warp_can_meet(tokens, tiers, warps, cluster):
    """The split of the kernel, in Python: no warp has more steps, or more bytes waiting, than the host reserves."""
    own = layouts(tiers)[: len(tokens)]
    shape = decode_cuda.Shape.of(own, group=4, update_scores=True, bfloat16=False, cluster=cluster, warps=warps)
    all_warps = warps * cluster
    steps, waiting = [0] * all_warps, [0] * all_warps
    for tier, (count, layout, described) in enumerate(zip(tokens, own, shape.tiers, strict=True)):
        step = 16 * described[7]
        total = count // layout.tokens * math.ceil(layout.tokens / step) + math.ceil(count % layout.tokens / step)
        for warp in range(all_warps):
            place = warp if tier == 0 else all_warps - 1 - warp
            run = total // all_warps + (place < total % all_warps)
            steps[warp] += run
            waiting[warp] += run * (4 * step + 8) * 2
    assert max(steps) <= shape.steps_per_warp(sum(tokens))
    assert max(waiting) <= shape.waiting_per_warp(sum(tokens))
    assert shape.waiting_per_warp(sum(tokens)) % 8 == 0


@pytest.mark.parametrize(
    ("tiers", "head_dim", "group", "reason"),
    [
        ("K8V4", 80, 4, "head_dim 80"),
        ("K8V4", 128, 9, "9 query heads"),
        ("K8V4 K4V2 K2V1", 128, 4, "3 tiers"),
        ("K4V2:2/4", 128, 4, "several scale groups"),
        ("K1V1", 64, 4, "rows of less than 16 bytes"),
        ("K8V4 K4V2", 128, 4, ""),
    ],
)
def test_says_which_shapes_it_leaves_to_triton(tiers, head_dim, group, reason):
    found = decode_cuda.unsupported(layouts(tiers, head_dim, 6656), group=group)
    assert (reason in found) if reason else found == ""


@needs_cuda
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V8", "K4V8 K2V4", "K8V2 K4V1", "FP16 K4V4", "FP16", "K2V1 K1V1"])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_the_float64_reference(tiers, group, dtype):
    head_dim, kv_heads, tokens = 128, 2, 700
    n_tiers = len(tiers.split())
    key = random_rows(3, kv_heads, tokens, head_dim, seed=1).clamp(-200, 200)
    value = random_rows(3, kv_heads, tokens, head_dim, seed=2).clamp(-200, 200)
    tier = mixed_tiers(3, kv_heads, tokens, n_tiers, lengths=[700, 65, 1])
    view, rows, _ = filled_view(key, value, tier, tiers, page_bytes=6784)
    twin = paged_helpers.moved(view, "cpu")
    query = torch.randn(3, kv_heads * group, head_dim, device=view.pool.device).to(dtype)
    options = {"layer": 1, "scale": head_dim**-0.5, "max_tokens": tokens}
    out = torch.full_like(query, float("nan"))
    decode_cuda.decode_attention_cuda(view, query, requests=rows, out=out, **options)
    expected = reference_attention.decode_attention(twin, query.cpu().double(), requests=rows.cpu(), **options)
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error <= (2e-3 if dtype == torch.float16 else 4e-3)
    scores = view.pool.view(torch.float32).cpu().nan_to_num(), twin.pool.view(torch.float32).nan_to_num()
    torch.testing.assert_close(*scores, rtol=2e-3, atol=1e-5)
