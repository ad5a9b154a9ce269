"""Asymmetric min-max quantisation with any number of levels, FP16 scale and zero point (DiffKV section 6).

``x`` is stored as ``code = round((x - zero) / scale)`` and used as ``zero + scale * code``. The zero point is the
minimum rounded *down* to FP16 and the scale is rounded *up*, so that every value lies inside the grid and the
error never exceeds half a (stored) step. Rounded to nearest, as one would do naively, a narrow range far from zero
would be clipped by many steps, and a subnormal range would get a scale of zero.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST = 65504.0  # of FP16
_INFINITE = 0x7C00

Axis = Literal["token", "channel", "tensor"]


@dataclass(frozen=True)
class Quantized:
    """``codes`` uint8 in the shape of what was quantised; ``scale``, ``zero`` FP16, one a group.

    With axis token they are [..., tokens, groups], with channel [..., groups, channels], with tensor [..., 1].
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    levels: int
    axis: Axis
    group: int


def quantize(x: Tensor, levels: int, *, axis: Axis = "token", group: int | None = None) -> Quantized:
    """Quantise ``x`` [..., tokens, channels] to ``levels`` levels (2 to 256).

    ``axis`` says what shares a scale: the channels of a ``token``, the tokens of a ``channel``, or the whole
    [tokens, channels] ``tensor``. ``group`` splits it into runs of so many channels (token) or tokens (channel), the
    last one shorter where they do not divide. Raises ValueError for other levels, NaN, infinities and values beyond
    FP16's +-65504.
    """
    if not 2 <= levels <= 256:
        raise ValueError(f"levels is {levels}; allowed are 2 to 256")
    if axis not in ("token", "channel", "tensor"):
        raise ValueError(f"unknown axis {axis!r}; allowed are token, channel, tensor")
    if axis == "tensor" and group is not None:
        raise ValueError("a group belongs to axis token or channel; with axis tensor everything is one group")
    if group is not None and group < 1:
        raise ValueError(f"group is {group}; it must be at least 1")
    rows = _rows(x, axis)
    length = rows.shape[-1]
    size = min(group or length, length)
    grouped = _grouped(rows, size)
    codes, scale, zero = affine(grouped, levels)
    flat = codes.flatten(-2)[..., :length]
    return Quantized(_unrows(flat, x.shape, axis), _params(scale, axis), _params(zero, axis), levels, axis, size)


def dequantize(stored: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that ``stored`` stands for, in its shape."""
    rows = _rows(stored.codes, stored.axis)
    scale, zero = _params(stored.scale, stored.axis), _params(stored.zero, stored.axis)
    grouped = _grouped(rows, stored.group)
    values = restore(grouped, scale, zero, dtype).flatten(-2)[..., : rows.shape[-1]]
    return _unrows(values, stored.codes.shape, stored.axis)


def affine(grouped: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [..., n], scale and zero FP16 [...] of groups [..., n] that share a scale."""
    x = grouped.float()
    if x.numel() == 0:
        empty = torch.zeros(x.shape[:-1], dtype=torch.float16, device=x.device)
        return torch.zeros(x.shape, dtype=torch.uint8, device=x.device), empty, empty.clone()
    low, high = extremes(x)
    require_half_range(low, high)
    zero = _half_below(low)
    # By a tensor: CUDA multiplies by the reciprocal of a number instead, and a last bit differs from the CPU's.
    step = (high - zero.float()) / torch.full((), levels - 1, dtype=x.dtype, device=x.device)
    scale = half_above(step)
    # Only two levels over nearly all of FP16's range need a wider step than FP16 holds. The widest one, centred, still
    # brings every value within half a step.
    wide = step > LARGEST
    scale = torch.where(wide, LARGEST, scale)
    zero = torch.where(wide, -LARGEST / 2, zero)
    divisor = torch.where(scale > 0, scale, 1).float()  # a constant group has no step, and code 0
    codes = (x - zero.float()[..., None]).div_(divisor[..., None]).round_().clamp_(0, levels - 1)
    return _bytes(codes), scale, zero


def restore(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of ``codes`` [..., n] with ``scale`` and ``zero`` [...], computed in float32."""
    steps = codes.float() if codes.is_cuda else codes.int().float()  # see _bytes
    values = torch.addcmul(zero.float()[..., None], steps, scale.float()[..., None])
    # The top of the grid may lie half a step beyond the largest value, where FP16 itself ends.
    return (values.clamp_(-LARGEST, LARGEST) if dtype == torch.float16 else values).to(dtype)


def require_half_range(low: Tensor, high: Tensor) -> None:
    """Refuse what FP16 cannot hold, given the extremes: a NaN among values makes both NaN.

    On a CPU a ValueError names the value. On CUDA the assertion is left to the device: reading it back would stall
    every layer of every step.
    """
    fits = (low >= -LARGEST) & (high <= LARGEST)
    if fits.is_cuda:
        torch._assert_async(fits.all(), "keys or values to quantise hold NaN, infinity or magnitudes above 65504")
    elif not bool(fits.all()):
        wrong = torch.stack([low[~fits], high[~fits]]).flatten()
        worst = wrong[wrong.abs().nan_to_num(nan=torch.inf).argmax()].item()
        raise ValueError(f"a value to quantise is {worst:.7g}; allowed are finite values within +-65504 (FP16)")


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest over the last dimension; both NaN where there is one."""
    # One pass on a GPU. On a CPU it is not vectorised along a dimension: two passes take a tenth of the time.
    return torch.aminmax(x, dim=-1) if x.is_cuda else (x.amin(dim=-1), x.amax(dim=-1))


def _bytes(codes: Tensor) -> Tensor:
    """Whole numbers in float32 as uint8; on a CPU through int32, which is vectorised and the direct way is not."""
    return codes.to(torch.uint8) if codes.is_cuda else codes.int().to(torch.uint8)


def _half_below(x: Tensor) -> Tensor:
    """The largest FP16 number that is not above ``x``."""
    half = x.to(torch.float16)
    bits = half.view(torch.int16)
    lower = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, torch.full_like(bits, -32767)))
    return torch.where(half.float() > x, lower.view(torch.float16), half)


def half_above(x: Tensor) -> Tensor:
    """The smallest FP16 number that is not below ``x`` >= 0; infinity above 65504."""
    half = x.to(torch.float16)
    bits = half.view(torch.int16)
    upper = torch.where(bits < _INFINITE, bits + 1, bits)
    return torch.where(half.float() < x, upper.view(torch.float16), half)


def _rows(x: Tensor, axis: Axis) -> Tensor:
    """``x`` with what shares a scale in the last dimension."""
    if axis == "channel":
        return x.transpose(-1, -2)
    return x.flatten(-2) if axis == "tensor" else x


def _unrows(rows: Tensor, shape: torch.Size, axis: Axis) -> Tensor:
    return rows.transpose(-1, -2) if axis == "channel" else rows.reshape(shape)


def _params(params: Tensor, axis: Axis) -> Tensor:
    """Between [..., rows, groups] and the layout of :class:`Quantized`; its own inverse except for tensor."""
    if axis == "channel":
        return params.transpose(-1, -2)
    return params


def _grouped(rows: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., groups, size]; a short last group is filled with its own last value, which changes nothing."""
    missing = -rows.shape[-1] % size if size else 0
    if missing:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
    return rows.unflatten(-1, (-1, size)) if size else rows.unsqueeze(-2)
