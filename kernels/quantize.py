"""Quantise to any number of levels, and back: a scale for each token and head, or for groups of its channels.

One pass over the numbers, where ``core.quantize`` takes one for every step of the arithmetic; the same codes, bit for
bit. Rows are all that stands before the last dimension, so a whole cache of layers and heads is one launch.
"""

import torch
import triton
import triton.language as tl
from diffkv_repro.kernels.pages import affine_to, rounded_to
from torch import Tensor

_TILE = 4096  # numbers that a program holds


@triton.jit
def quantize_kernel(
    x, codes, scales, zeros, rows, channels, size, groups, levels, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    within = tl.arange(0, WIDTH)
    channel = group * size + within
    inside = (row < rows)[:, None] & ((within < size) & (channel < channels))[None, :]
    at = row[:, None] * channels + channel[None, :]
    # Rows beyond the last are computed as zeros and not stored.
    own = ((within < size) & (channel < channels))[None, :] & (row >= 0)[:, None]
    found, scale, zero = affine_to(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), own, (levels - 1) * 1.0)
    tl.store(codes + at, found.to(tl.uint8), mask=inside)
    tl.store(scales + row * groups + group, scale, mask=row < rows)
    tl.store(zeros + row * groups + group, zero, mask=row < rows)


@triton.jit
def dequantize_kernel(
    codes, scales, zeros, out, rows, channels, size, groups, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    within = tl.arange(0, WIDTH)
    channel = group * size + within
    inside = (row < rows)[:, None] & ((within < size) & (channel < channels))[None, :]
    at = row[:, None] * channels + channel[None, :]
    scale = tl.load(scales + row * groups + group, mask=row < rows, other=0.0).to(tl.float32)
    zero = tl.load(zeros + row * groups + group, mask=row < rows, other=0.0).to(tl.float32)
    steps = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    # The product is exact in float32: fused with the sum or not, it rounds once.
    values = rounded_to(zero[:, None] + steps * scale[:, None], out)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def quantize_triton(x: Tensor, levels: int, *, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 in the shape of ``x`` [..., tokens, channels], scale and zero FP16 [..., tokens, groups].

    ``levels`` 2 to 256, ``group`` channels to a scale (all, unless given; the last group may be shorter). Values
    beyond FP16's +-65504 and NaN are not looked for.
    """
    x = x.contiguous()
    rows, channels, size, groups = _shape(x, group)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale, zero = (torch.empty(*x.shape[:-1], groups, dtype=torch.float16, device=x.device) for _ in range(2))
    if x.numel():
        width = max(16, triton.next_power_of_2(size))
        block = _block(rows, width)
        quantize_kernel[(triton.cdiv(rows, block), groups)](
            x, codes, scale, zero, rows, channels, size, groups, levels, BLOCK=block, WIDTH=width
        )
    return codes, scale, zero


def dequantize_triton(
    codes: Tensor, scale: Tensor, zero: Tensor, *, group: int | None = None, dtype: torch.dtype = torch.float16
) -> Tensor:
    """The values in ``dtype`` that :func:`quantize_triton`'s codes stand for, in their shape."""
    codes, scale, zero = codes.contiguous(), scale.contiguous(), zero.contiguous()
    rows, channels, size, groups = _shape(codes, group)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        width = max(16, triton.next_power_of_2(size))
        block = _block(rows, width)
        dequantize_kernel[(triton.cdiv(rows, block), groups)](
            codes, scale, zero, out, rows, channels, size, groups, BLOCK=block, WIDTH=width
        )
    return out


def _shape(x: Tensor, group: int | None) -> tuple[int, int, int, int]:
    """Rows, channels, channels to a scale, scales of a row."""
    channels = x.shape[-1]
    size = min(group or channels, channels)
    return x.shape[:-1].numel(), channels, size, triton.cdiv(channels, size) if size else 0


def _block(rows: int, width: int) -> int:
    return max(1, min(64, _TILE // width, triton.next_power_of_2(rows)))
