"""Uniform quantisation of each token and head in one pass: a Triton kernel on a GPU, ``core.quantize`` elsewhere."""

import torch
from torch import Tensor

from diffkv_repro.core.dispatch import uses_triton
from diffkv_repro.core.quantize import Quantized, dequantize, quantize


def quantize_tokens(x: Tensor, levels: int, *, group: int | None = None) -> Quantized:
    """``x`` [..., tokens, channels] as ``core.quantize.quantize`` gives it with axis token, bit for bit.

    Leading dimensions (layers, keys and values, heads) may be any. On a GPU values beyond FP16's +-65504 and NaN are
    not looked for: a frame scales its numbers first. Raises ValueError for levels other than 2 to 256 and a group
    below 1.
    """
    if not uses_triton(x):
        return quantize(x, levels, group=group)
    if not 2 <= levels <= 256:
        raise ValueError(f"levels is {levels}; allowed are 2 to 256")
    if group is not None and group < 1:
        raise ValueError(f"group is {group}; it must be at least 1")
    from diffkv_repro.kernels.quantize import quantize_triton

    codes, scale, zero = quantize_triton(x, levels, group=group)
    channels = x.shape[-1]
    return Quantized(codes, scale, zero, levels, "token", min(group or channels, channels))


def dequantize_tokens(stored: Quantized, dtype: torch.dtype = torch.float16) -> Tensor:
    """The values in ``dtype`` that ``stored``, of axis token, stands for. Raises ValueError for another axis."""
    if stored.axis != "token":
        raise ValueError(f"axis is {stored.axis!r}; allowed is token")
    if not uses_triton(stored.codes):
        return dequantize(stored, dtype)
    from diffkv_repro.kernels.quantize import dequantize_triton

    return dequantize_triton(stored.codes, stored.scale, stored.zero, group=stored.group, dtype=dtype)
