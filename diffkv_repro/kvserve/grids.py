"""``Grid``: how one tensor of a layer is rounded: how many levels, and what shares a scale."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.core.quantize import (
    LARGEST,
    Quantized,
    dequantize,
    extremes,
    half_above,
    quantize,
    require_half_range,
)
from diffkv_repro.kvserve.registry import require_choice, require_flag, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

KEPT = 65536  # levels of a number that stays in 16 bits
_PIECE = 1 << 18  # numbers
AXES = ("token", "channel", "tensor")
AXIS_PAIR = rf"({'|'.join(AXES)})/({'|'.join(AXES)})"  # of keys and of values, as profiles are written


@dataclass(frozen=True)
class Grid:
    """``levels`` 2 to 256; 0 drops the tensor, 65536 keeps it in 16 bits. Steps of equal size between the extremes of
    what shares a scale (KVServe, stage Q).

    ``axis`` token: the channels of a token, over all heads with ``joint``, else of each head; ``group`` splits those.
    ``axis`` channel: the tokens of a channel of a head; ``group`` splits them. ``axis`` tensor: the layer or head.
    ``symmetric``: one scale, no zero point, levels - 1 codes about 0 (CacheGen).

    The error is at most half a stored step: of (max - min) / (levels - 1), or of 2 max |x| / (levels - 2), rounded up
    to FP16.
    """

    levels: int
    axis: str = "token"
    group: int | None = None
    joint: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        require_levels_of("levels", self.levels)
        require_choice("axis", self.axis, AXES)
        require_flag("joint", self.joint)
        require_flag("symmetric", self.symmetric)
        if self.group is not None:
            require_whole("group", self.group, 1)
            if self.axis == "tensor":
                raise ValueError(f"group is {self.group}; with axis tensor there is none")
        if self.symmetric and (self.axis != "token" or self.group is not None or 0 < self.levels < 4):
            raise ValueError("a symmetric grid has axis token, no group and at least 4 levels")

    def write(self, tensor: Tensor, streams: StreamWriter, half: torch.dtype) -> None:
        """``tensor`` [heads, tokens, channels] within +-65504."""
        if not self.levels or not tensor.numel():
            return
        if self.levels == KEPT:
            streams.numbers(tensor.to(half))
            return
        heads, tokens, channels = tensor.shape
        shape = (1, tokens, heads * channels) if self._joins else (heads, tokens, channels)
        codes = torch.empty(shape, dtype=torch.uint8, device=tensor.device)
        parts: list[tuple[Tensor, ...]] = []
        for piece, into in zip(self._split(tensor), self._pieces(codes), strict=True):
            if self.symmetric:
                found, *params = _symmetric(piece, self.levels)
                into.copy_(found)
            else:
                params = self._quantised(piece, into)
            parts.append(tuple(params))
        for params in zip(*parts, strict=True):
            streams.meta(torch.cat(params, dim=self._along))
        streams.codes(codes, self._symbols)

    def read(
        self, shape: tuple[int, int, int], streams: StreamReader, half: torch.dtype, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """``shape`` [heads, tokens, channels] in ``dtype``; zeros for what was dropped."""
        heads, tokens, channels = shape
        if not self.levels or not heads * tokens * channels:
            return torch.zeros(shape, dtype=dtype)
        if self.levels == KEPT:
            return streams.numbers(shape, half).to(dtype)
        block = (1, tokens, heads * channels) if self._joins else shape
        params = [streams.meta(self._params(block), torch.float16) for _ in range(1 if self.symmetric else 2)]
        codes = streams.codes(block, self._symbols)
        values = torch.empty(block, dtype=dtype)
        pieces = zip(*map(self._pieces, (codes, values)), strict=True)
        starts = 0
        for piece, into in pieces:
            extent = piece.shape[self._along]
            own = [param.narrow(self._along, starts, extent) for param in params]
            starts += extent
            into.copy_(self._values(piece, own, dtype))
        if not self._joins:
            return values
        return values.view(tokens, heads, channels).permute(1, 0, 2)

    def _quantised(self, piece: Tensor, into: Tensor) -> list[Tensor]:
        """Scale and zero point of a piece, whose codes go ``into``; a head of many tokens channel by channel."""
        width = piece.shape[-1]
        if self.axis == "channel":
            width = max(1, _PIECE * width // max(_PIECE, piece.numel()))
        found = []
        for part, codes in zip(piece.split(width, dim=-1), into.split(width, dim=-1), strict=True):
            stored = quantize(part, self.levels, axis=self.axis, group=self.group)
            codes.copy_(stored.codes)
            found.append((stored.scale, stored.zero))
        return [torch.cat(params, dim=-1) if len(found) > 1 else params[0] for params in zip(*found, strict=True)]

    def _values(self, codes: Tensor, params: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.symmetric:
            values = (codes.int() - (self.levels // 2 - 1)).float() * params[0].float()[..., None]
            return values.clamp_(-LARGEST, LARGEST)  # the step is rounded up, which may lead beyond FP16
        extent = codes.shape[-2] if self.axis == "channel" else codes.shape[-1]
        size = extent if self.axis != "tensor" else codes.shape[-1] * codes.shape[-2]
        return dequantize(Quantized(codes, *params, self.levels, self.axis, min(self.group or size, size)), dtype)

    @property
    def _along(self) -> int:
        """The dimension along which nothing is shared: tokens for axis token, else heads."""
        return 1 if self.axis == "token" else 0

    def _pieces(self, block: Tensor) -> tuple[Tensor, ...]:
        """Parts that are quantised one at a time: in the processor's cache, and no layer in float32 in memory."""
        extent = max(1, _PIECE * block.shape[self._along] // block.numel())
        return block.split(extent, dim=self._along)

    def _split(self, tensor: Tensor) -> Iterator[Tensor]:
        """The same parts of what is not in that form yet: the heads of a token are brought together in each."""
        if not self._joins:
            yield from self._pieces(tensor)
            return
        extent = max(1, _PIECE * tensor.shape[1] // tensor.numel())
        for piece in tensor.split(extent, dim=1):
            yield piece.permute(1, 0, 2).reshape(1, piece.shape[1], -1)

    @property
    def _symbols(self) -> int:
        return self.levels - 1 if self.symmetric else self.levels

    @property
    def _joins(self) -> bool:
        return self.joint and self.axis != "channel" and self.group is None

    def _params(self, block: tuple[int, int, int]) -> tuple[int, ...]:
        heads, tokens, channels = block
        if self.symmetric:
            return heads, tokens
        if self.axis == "tensor":
            return heads, 1
        if self.axis == "channel":
            return heads, -(-tokens // min(self.group or tokens, tokens)), channels
        return heads, tokens, -(-channels // min(self.group or channels, channels))


def require_levels_of(name: str, levels: object) -> None:
    """Raise ValueError unless ``levels`` is 0, 2 to 256, or 65536."""
    whole = isinstance(levels, int) and not isinstance(levels, bool)
    if not whole or not (levels in (0, KEPT) or 2 <= levels <= 256):
        raise ValueError(f"{name} is {levels!r}; allowed are 2 to 256 levels, 0 to drop, {KEPT} to keep 16 bits")


def _symmetric(block: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes 0 to levels - 2 of [..., channels], and the FP16 step of each token."""
    block = block.float()
    low, high = extremes(block)
    require_half_range(low, high)
    middle = levels // 2 - 1
    step = torch.maximum(-low, high) / middle
    scale = half_above(step)  # rounded down, it would leave the largest value beyond the last code
    divisor = torch.where(scale > 0, scale, 1).float()
    return (block / divisor[..., None]).round_().add_(middle).clamp_(0, 2 * middle).int().to(torch.uint8), scale
