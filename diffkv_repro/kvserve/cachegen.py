"""CacheGen (Liu et al., SIGCOMM 2024) as KVServe recombines it: levels that fall with the layer, one scale a token."""

from dataclasses import dataclass
from typing import ClassVar

from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.grids import Grid
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.quantizers import QUANTIZERS, Quantizer
from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

# Levels of keys in the first, the middle and the last layers, of values in the first few and the rest.
_KEYS = {1: (16, 16, 12), 2: (32, 16, 16), 3: (32, 32, 32)}
_VALUES = {1: (16, 12), 2: (32, 16), 3: (32, 32)}


@QUANTIZERS.add
@dataclass(frozen=True)
class CacheGen(Quantizer):
    """``level`` 1 (smallest) to 3 (best): CacheGen's own tables, cut at the depths that KVServe's copy uses.

    Keys change at 0.32 and 0.63 of the layers. Values change after the second layer at level 2, as in CacheGen's table
    for 7B models, and at max(2, 0.15 of the layers) at level 1. b levels are b - 1 codes about zero, with one scale a
    token over all heads and channels. Meant for a codec with statistics per channel (``range per=channel``).
    """

    level: int = 2
    name: ClassVar[str] = "cachegen"
    format_id: ClassVar[int] = 8
    shorthand = ((r"level (\d+)", ("level",)),)

    def __post_init__(self) -> None:
        require_whole("level", self.level, 1, 3)

    def levels(self, layer: int, layers: int) -> tuple[int, int]:
        """Of keys and values in a layer."""
        early, middle, late = _KEYS[self.level]
        key = early if layer < round(0.32 * layers) else middle if layer < round(0.63 * layers) else late
        first, rest = _VALUES[self.level]
        cut = max(2, round(0.15 * layers)) if self.level == 1 else 2
        return key, first if layer < cut else rest

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        for grid, tensor in zip(self._grids(place), (layer.key, layer.value), strict=True):
            grid.write(tensor, streams, place.half)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        return LayerKV(*(grid.read(place.shape, streams, place.half, place.dtype) for grid in self._grids(place)))

    def _grids(self, place: Place) -> list[Grid]:
        return [Grid(levels, symmetric=True) for levels in self.levels(place.layer, place.layout.layers)]

    def __str__(self) -> str:
        return f"{self.name} level {self.level}"
