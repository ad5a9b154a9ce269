"""Quantizers: the middle stage of a profile, one layer's keys and values into streams of codes and back."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from diffkv_repro.kvserve.grids import AXIS_PAIR, Grid
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.registry import Part, Registry, require_flag, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

if TYPE_CHECKING:
    from diffkv_repro.kvserve.assets import Place

QUANTIZERS = Registry("quantizer")


@dataclass(frozen=True)
class Quantizer(Part):
    """Keys and values [kv_heads, tokens, head_dim] within +-65504, to streams and back in ``place.dtype``."""

    exact: ClassVar[bool] = False  # takes the model's own numbers, of any size, and gives them back
    ranks_heads: ClassVar[bool] = False  # needs ``Assets.heads``
    ranks_tokens: ClassVar[bool] = False  # needs ``Assets.token_scores``
    in_turn: ClassVar[bool] = False  # has :meth:`encode_part`: all keys are written before the first value

    @abstractmethod
    def encode(self, layer: LayerKV, place: "Place", streams: StreamWriter) -> None:
        """Write one layer. Raises ValueError where ``place`` lacks what it needs (scores of heads or tokens)."""

    def encode_part(self, x: Tensor, part: int, place: "Place", streams: StreamWriter) -> None:
        """What :meth:`encode` writes of the keys (part 0) or the values (1), where :attr:`in_turn` says so."""
        raise NotImplementedError(f"quantizer {self.name} takes keys and values together")

    @abstractmethod
    def decode(self, place: "Place", streams: StreamReader) -> LayerKV:
        """Read one layer. Raises CodecError for streams that are not its own."""


@QUANTIZERS.add
@dataclass(frozen=True)
class Exact(Quantizer):
    """Nothing is rounded: keys and values as the model keeps them (after a transform, as float32 gives them back)."""

    name: ClassVar[str] = "none"
    format_id: ClassVar[int] = 1
    exact: ClassVar[bool] = True

    def encode(self, layer: LayerKV, place: "Place", streams: StreamWriter) -> None:
        for tensor in (layer.key, layer.value):
            streams.numbers(tensor.to(place.layout.dtype))

    def decode(self, place: "Place", streams: StreamReader) -> LayerKV:
        return LayerKV(*(streams.numbers(place.shape, place.layout.dtype) for _ in range(2)))


@QUANTIZERS.add
@dataclass(frozen=True)
class Uniform(Quantizer):
    """Equal steps: any number of levels for keys and for values, and any of three axes (KVServe, stage Q).

    ``joint`` lets the heads of a token share its scale, as in KVServe; without, every head has its own, as in QuaRot.
    Keys per channel and values per token are KVServe's defaults. Error: see :class:`Grid`.
    """

    key_levels: int = 16
    value_levels: int = 16
    key_axis: str = "channel"
    value_axis: str = "token"
    key_group: int | None = None
    value_group: int | None = None
    joint: bool = True
    name: ClassVar[str] = "uniform"
    format_id: ClassVar[int] = 2
    in_turn: ClassVar[bool] = True
    shorthand = (
        (r"K(\d+) V(\d+)", ("key_levels", "value_levels")),
        (AXIS_PAIR, ("key_axis", "value_axis")),
        (r"g=(\d+|-)/(\d+|-)", ("key_group", "value_group")),
        (r"per head", {"joint": False}),
    )

    def __post_init__(self) -> None:
        require_flag("joint", self.joint)
        for grid in self.grids:
            if not grid.levels:
                raise ValueError("levels is 0; a ladder can drop tokens, a uniform quantizer needs at least 2 levels")

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """Of keys and of values."""
        return (
            Grid(self.key_levels, self.key_axis, self.key_group, self.joint),
            Grid(self.value_levels, self.value_axis, self.value_group, self.joint),
        )

    def encode(self, layer: LayerKV, place: "Place", streams: StreamWriter) -> None:
        for part, tensor in enumerate((layer.key, layer.value)):
            self.encode_part(tensor, part, place, streams)

    def encode_part(self, x: Tensor, part: int, place: "Place", streams: StreamWriter) -> None:
        self.grids[part].write(x, streams, place.half)

    def decode(self, place: "Place", streams: StreamReader) -> LayerKV:
        return LayerKV(*(grid.read(place.shape, streams, place.half, place.dtype) for grid in self.grids))

    def __str__(self) -> str:
        words = [f"{self.name} K{self.key_levels} V{self.value_levels}", f"{self.key_axis}/{self.value_axis}"]
        if self.key_group or self.value_group:
            words.append(f"g={self.key_group or '-'}/{self.value_group or '-'}")
        return " ".join(words if self.joint else [*words, "per head"])


@QUANTIZERS.add
@dataclass(frozen=True)
class Kivi(Quantizer):
    """KIVI (Liu et al., ICML 2024): keys per channel, values per token, the newest tokens in 16 bits.

    ``group`` tokens of a key channel, or channels of a value, share a scale. Of the keys the last (tokens mod
    ``residual``) stay in 16 bits, of the values always the last ``residual``. 2 bits with groups of 32 take 3 bits a
    value, which is the ratio of 5.33 that KVServe quotes as KIVI's ceiling.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    name: ClassVar[str] = "kivi"
    format_id: ClassVar[int] = 3
    in_turn: ClassVar[bool] = True
    shorthand = ((r"(\d+)-bit", ("bits",)), (r"g=(\d+)", ("group",)), (r"R=(\d+)", ("residual",)))

    def __post_init__(self) -> None:
        require_whole("bits", self.bits, 1, 8)
        require_whole("group", self.group, 1)
        require_whole("residual", self.residual, 1)
        if self.residual % self.group:
            raise ValueError(f"residual is {self.residual}; allowed are multiples of the group of {self.group} tokens")

    def encode(self, layer: LayerKV, place: "Place", streams: StreamWriter) -> None:
        for part, tensor in enumerate((layer.key, layer.value)):
            self.encode_part(tensor, part, place, streams)

    def encode_part(self, x: Tensor, part: int, place: "Place", streams: StreamWriter) -> None:
        quantised, grid = self._split(place)[part]
        grid.write(x[:, :quantised], streams, place.half)
        streams.numbers(x[:, quantised:].to(place.half))

    def decode(self, place: "Place", streams: StreamReader) -> LayerKV:
        heads, tokens, channels = place.shape
        found: list[Tensor] = []
        for quantised, grid in self._split(place):
            coded = grid.read((heads, quantised, channels), streams, place.half, place.dtype)
            recent = streams.numbers((heads, tokens - quantised, channels), place.half).to(place.dtype)
            found.append(torch.cat([coded, recent], dim=1))
        return LayerKV(*found)

    def _split(self, place: "Place") -> list[tuple[int, Grid]]:
        """Tokens that are quantised, and how: keys, values."""
        keys = place.tokens - place.tokens % self.residual
        values = max(0, place.tokens - self.residual)
        levels = 2**self.bits
        return [(keys, Grid(levels, "channel", self.group)), (values, Grid(levels, "token", self.group, joint=False))]

    def __str__(self) -> str:
        return f"{self.name} {self.bits}-bit g={self.group} R={self.residual}"
