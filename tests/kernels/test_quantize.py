"""The fused quantiser gives the codes, scales and values of ``core.quantize``, whatever shape and levels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_helpers import DEVICE, random_rows

from diffkv_repro.core.quantize import Quantized, dequantize, quantize
from diffkv_repro.kvserve.token_codes import dequantize_tokens, quantize_tokens

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def same(x, levels, group=None, dtypes=(torch.float16, torch.float32)):
    """Both ways give the same bits; returns what the kernel gave."""
    twin = quantize(x, levels, group=group)
    kernel = quantize_tokens(x.to(DEVICE), levels, group=group)
    assert (kernel.levels, kernel.axis, kernel.group) == (twin.levels, twin.axis, twin.group)
    for name in ("codes", "scale", "zero"):
        found, expected = getattr(kernel, name).cpu(), getattr(twin, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), name
    for dtype in dtypes:
        found, expected = dequantize_tokens(kernel, dtype).cpu(), dequantize(twin, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, expected)
    return kernel


@pytest.mark.parametrize(
    ("shape", "levels", "group", "dtype"),
    [
        ((2, 3, 33, 128), 16, None, torch.float16), ((1, 1, 1, 1), 2, None, torch.float16),
        ((2, 65, 80), 256, None, torch.bfloat16), ((3, 17, 96), 12, 32, torch.float16),
        ((7, 129), 3, 100, torch.float32), ((2, 5, 64), 255, 7, torch.bfloat16), ((1, 4, 300), 6, None, torch.float16),
        ((4, 16), 4, 64, torch.float16), ((2, 2, 9, 256), 2, 1, torch.float32),
    ],
)  # fmt: skip
def test_codes_are_the_twin_s_bit_for_bit(shape, levels, group, dtype):
    """Constant rows, rows of zeros, narrow and tiny ranges and the ends of FP16 are among the rows."""
    heads = shape[:-2].numel() if isinstance(shape, torch.Size) else max(1, torch.Size(shape[:-2]).numel())
    x = random_rows(1, heads, shape[-2], shape[-1], seed=levels, dtype=dtype).cpu().reshape(shape)
    if dtype == torch.bfloat16:  # 65504 rounds up there, beyond FP16
        x = x.clamp(-65280, 65280)
    same(x, levels, group)


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 70), channels=st.integers(1, 140), levels=st.integers(2, 256), group=st.integers(1, 150),
    spread=st.sampled_from([1e-6, 1.0, 3e4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_size(rows, channels, levels, group, spread, seed):
    x = (spread * torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed))).clamp(-65504, 65504)
    kernel = same(x, levels, group, dtypes=(torch.float32,))
    assert int(kernel.codes.max()) < levels


def test_values_in_bfloat16_are_rounded_to_nearest():
    x = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(1))
    same(x, 256, dtypes=(torch.bfloat16,))


def test_half_a_step_is_the_most_that_is_lost():
    x = torch.randn(2, 4, 40, 128, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    stored = quantize_tokens(x, 16)
    lost = (dequantize_tokens(stored, torch.float32) - x.float()).abs()
    assert float((lost / stored.scale.float()).max()) <= 0.5001


def test_strided_and_empty_tensors():
    x = torch.randn(5, 2, 31, 64, generator=torch.Generator().manual_seed(3)).transpose(0, 1)
    assert not x.is_contiguous()
    same(x, 9)
    empty = quantize_tokens(torch.zeros(2, 0, 64, device=DEVICE), 4)
    assert (empty.codes.shape, empty.scale.shape) == ((2, 0, 64), (2, 0, 1))
    assert dequantize_tokens(empty).shape == (2, 0, 64)


def test_bad_requests_are_named():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="levels is 257; allowed are 2 to 256"):
        quantize_tokens(x, 257)
    with pytest.raises(ValueError, match="group is 0; it must be at least 1"):
        quantize_tokens(x, 4, group=0)
    stored = quantize(torch.zeros(2, 8), 4, axis="channel")
    with pytest.raises(ValueError, match="axis is 'channel'; allowed is token"):
        dequantize_tokens(Quantized(stored.codes, stored.scale, stored.zero, 4, "channel", 2))
