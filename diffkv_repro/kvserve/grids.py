"""``Grid``: how one tensor of a layer is rounded: how many levels, and what shares a scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.core.quantize import Quantized, dequantize, extremes, half_above, quantize, require_half_range
from diffkv_repro.kvserve.registry import require_choice, require_flag, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

KEPT = 65536  # levels of a number that stays in 16 bits
AXES = ("token", "channel", "tensor")


@dataclass(frozen=True)
class Grid:
    """``levels`` 2 to 256; 0 drops the tensor, 65536 keeps it in 16 bits. Steps of equal size between the extremes of
    what shares a scale (KVServe section 4, stage Q).

    ``axis`` token: the channels of a token, over all heads with ``joint``, else of each head; ``group`` splits them.
    ``axis`` channel: the tokens of a channel of a head; ``group`` splits those. ``axis`` tensor: the layer or head.
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
        block = self._block(tensor)
        if self.symmetric:
            codes, scale = _symmetric(block, self.levels)
            params = [scale]
        else:
            stored = quantize(block, self.levels, axis=self.axis, group=self.group)
            codes, params = stored.codes, [stored.scale, stored.zero]
        for param in params:
            streams.meta(param)
        streams.codes(codes, self._symbols)

    def read(self, shape: tuple[int, int, int], streams: StreamReader, half: torch.dtype) -> Tensor:
        """Float32 of ``shape`` [heads, tokens, channels]; zeros for what was dropped."""
        heads, tokens, channels = shape
        if not self.levels or not heads * tokens * channels:
            return torch.zeros(shape)
        if self.levels == KEPT:
            return streams.numbers(shape, half).float()
        block = (1, tokens, heads * channels) if self._joins else shape
        params = [streams.meta(self._params(block), torch.float16) for _ in range(1 if self.symmetric else 2)]
        codes = streams.codes(block, self._symbols)
        if self.symmetric:
            middle = self.levels // 2 - 1
            values = (codes.int() - middle).float() * params[0].float()[..., None]
        else:
            extent = block[-2] if self.axis == "channel" else block[-1]
            size = extent if self.axis != "tensor" else block[-1] * block[-2]
            values = dequantize(Quantized(codes, *params, self.levels, self.axis, min(self.group or size, size)))
        if not self._joins:
            return values
        return values.view(tokens, heads, channels).permute(1, 0, 2)

    @property
    def _symbols(self) -> int:
        return self.levels - 1 if self.symmetric else self.levels

    @property
    def _joins(self) -> bool:
        return self.joint and self.axis != "channel" and self.group is None

    def _block(self, tensor: Tensor) -> Tensor:
        return tensor.permute(1, 0, 2).reshape(1, tensor.shape[1], -1) if self._joins else tensor

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
