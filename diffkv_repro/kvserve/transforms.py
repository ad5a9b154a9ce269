"""Transforms: the first stage of a profile, what makes keys and values easier to quantise and is undone afterwards.

They work in float32. An inverse is exact but for the rounding of that: a relative 2**-22 or so of the largest number
involved, which every docstring names.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffkv_repro.core.hadamard import rotation
from diffkv_repro.core.quantize import LARGEST, Quantized, dequantize, quantize
from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.registry import Part, Registry, require_choice, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

TRANSFORMS = Registry("transform")
_TOKENS = 4096  # of a head that are changed at a time


@dataclass(frozen=True)
class Transform(Part):
    """A reversible change of one layer's keys and values [kv_heads, tokens, head_dim], which come as the model keeps
    them and may be left so; what is changed is computed, and handed on, in float32."""

    needs_rotary: ClassVar[bool] = False  # needs ``Assets.rotary``
    by_part: ClassVar[bool] = False  # has :meth:`forward_part`: keys and values each by themselves, nothing written

    @abstractmethod
    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        """As they are to be quantised; what the inverse needs beside that goes into ``streams``."""

    def forward_part(self, x: Tensor, part: int, place: Place) -> Tensor:
        """:meth:`forward` of the keys (part 0) or the values (1) alone, where :attr:`by_part` says so."""
        raise NotImplementedError(f"transform {self.name} changes keys and values together")

    def growth(self, place: Place) -> float:
        """How many times the largest number :meth:`forward_part` can give at most; infinite where nobody knows."""
        return float("inf")

    @abstractmethod
    def inverse(self, layer: LayerKV, place: Place, side: Any) -> LayerKV:
        """As the model wants them; ``side`` is what :meth:`read` found."""

    def read(self, place: Place, streams: StreamReader) -> Any:
        """What :meth:`forward` wrote."""
        return None

    def state(self, assets: Assets) -> bytes:
        """Digest of what both sides must have in common, b"" for none. Raises ValueError where it is missing."""
        return b""


@TRANSFORMS.add
@dataclass(frozen=True)
class Hadamard(Transform):
    """Random signs, then an orthonormal Hadamard rotation over the channels of a head (QuaRot; KVServe, stage T).

    Signs come from ``seed`` ^ (layer << 16) ^ head, as in KVServe. Any head_dim: where no Hadamard matrix is known, one
    almost as even (``core.hadamard``; KVServe splits such a head into powers of two, which mixes less). Error of the
    inverse: below 1e-5 of the norm of a vector.
    """

    seed: int = 0x3333
    name: ClassVar[str] = "hadamard"
    format_id: ClassVar[int] = 1
    by_part: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole("seed", self.seed, 0, 2**63 - 1)

    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        return _both(layer, lambda x, part: self.forward_part(x, part, place))

    def forward_part(self, x: Tensor, part: int, place: Place) -> Tensor:
        signs, turn = self._signs(place), _turn(place.layout.head_dim)
        return _by_head(x, lambda own, head: torch.matmul(own * signs[head], turn))

    def growth(self, place: Place) -> float:
        # No coordinate of a turned vector is longer than the vector; the rest is for rounding.
        return 1.001 * place.layout.head_dim**0.5

    def inverse(self, layer: LayerKV, place: Place, side: Any) -> LayerKV:
        signs, turn = self._signs(place), _turn(place.layout.head_dim)
        return _both(layer, lambda x, _: _by_head(x, lambda own, head: torch.matmul(own, turn.T) * signs[head]))

    def _signs(self, place: Place) -> Tensor:
        return _signs(self.seed, place.layer, place.layout.kv_heads, place.layout.head_dim)


@TRANSFORMS.add
@dataclass(frozen=True)
class Delta(Transform):
    """Every token less the first of its ``group``, its anchor (CacheGen: groups of 10 tokens).

    Anchors are sent in 8 bits, a scale for each head vector, and every token, the anchor too, is taken from the anchor
    as it arrives: errors do not add up, and the inverse is exact but for the rounding of one addition.
    """

    group: int = 10
    name: ClassVar[str] = "delta"
    format_id: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_whole("group", self.group, 1)

    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        def difference(x: Tensor, _: int) -> Tensor:
            power = power_of(x)
            x = x.float()
            anchors = quantize(torch.ldexp(x[:, :: self.group], torch.tensor(-power)), 256)
            streams.meta(torch.tensor([power], dtype=torch.uint8))
            streams.meta(anchors.scale)
            streams.meta(anchors.zero)
            streams.codes(anchors.codes, 256)
            return x - self._spread(anchors, power, place.tokens)

        return _both(layer, difference)

    def read(self, place: Place, streams: StreamReader) -> list[Tensor]:
        heads, tokens, channels = place.shape
        count = -(-tokens // min(self.group, tokens))
        found = []
        for _ in range(2):
            power = int(streams.meta((1,), torch.uint8))
            scale, zero = (streams.meta((heads, count, 1), torch.float16) for _ in range(2))
            codes = streams.codes((heads, count, channels), 256)
            found.append(self._spread(Quantized(codes, scale, zero, 256, "token", channels), power, tokens))
        return found

    def inverse(self, layer: LayerKV, place: Place, side: list[Tensor]) -> LayerKV:
        return _both(layer, lambda x, part: x + side[part])

    def _spread(self, anchors: Quantized, power: int, tokens: int) -> Tensor:
        values = torch.ldexp(dequantize(anchors), torch.tensor(power))
        return values.repeat_interleave(min(self.group, tokens), dim=1)[:, :tokens]


@TRANSFORMS.add
@dataclass(frozen=True)
class Affine(Transform):
    """A learnt map of each head, ``diag`` or ``full`` (``transform_state.AffineMaps``, trained on a few texts).

    Both sides need the same maps; a frame carries their digest. Error of the inverse: float32 rounding times the
    matrix's condition number, which is 1 for the principal axes and at most e**10 for scales.
    """

    kind: str = "diag"
    name: ClassVar[str] = "affine"
    format_id: ClassVar[int] = 3

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ("diag", "full"))

    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        maps = place.assets.affine
        maps.require(place.layout)
        shift, matrix = (_of(own, place) for own in (maps.shift, maps.matrix))
        return _both(
            layer,
            lambda x, part: _by_head(x, lambda own, head: _apply(own - shift[part][head], matrix[part][head])),
        )

    def inverse(self, layer: LayerKV, place: Place, side: Any) -> LayerKV:
        maps = place.assets.affine
        maps.require(place.layout)
        shift, inverse = (_of(own, place) for own in (maps.shift, maps.inverse))
        return _both(
            layer,
            lambda x, part: _by_head(x, lambda own, head: _apply(own, inverse[part][head]) + shift[part][head]),
        )

    def state(self, assets: Assets) -> bytes:
        if assets.affine is None or assets.affine.kind != self.kind:
            have = "none" if assets.affine is None else assets.affine.kind
            raise ValueError(f"transform affine needs {self.kind} maps, and has {have}: pass assets=Assets(affine=...)")
        return assets.affine.digest


@TRANSFORMS.add
@dataclass(frozen=True)
class KeyBias(Transform):
    """Take the rotated bias of the key projection out of the keys (ours; in neither paper).

    Qwen-type models add one large vector to all keys before RoPE. ``RoPE(bias, position)`` is known to both sides, so
    it costs nothing to send. Models without such a bias are left alone. Error: the rounding of one addition.
    """

    name: ClassVar[str] = "keybias"
    format_id: ClassVar[int] = 4
    needs_rotary: ClassVar[bool] = True

    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        bias = self._bias(place)
        return layer if bias is None else replace(layer, key=layer.key - bias)

    def inverse(self, layer: LayerKV, place: Place, side: Any) -> LayerKV:
        bias = self._bias(place)
        return layer if bias is None else replace(layer, key=layer.key + bias)

    def state(self, assets: Assets) -> bytes:
        return _rotary_state(self.name, assets)

    def _bias(self, place: Place) -> Tensor | None:
        place.assets.rotary.require(place.layout)
        return place.assets.rotary.bias(place.layer, place.start, place.tokens)


@TRANSFORMS.add
@dataclass(frozen=True)
class Unrope(Transform):
    """Turn keys back to where they were before RoPE, so that a channel means the same at every position (KVQuant).

    Error of the inverse: a few float32 roundings of a vector's norm.
    """

    name: ClassVar[str] = "unrope"
    format_id: ClassVar[int] = 5
    needs_rotary: ClassVar[bool] = True

    def forward(self, layer: LayerKV, place: Place, streams: StreamWriter) -> LayerKV:
        return self._turned(layer, place, back=True)

    def inverse(self, layer: LayerKV, place: Place, side: Any) -> LayerKV:
        return self._turned(layer, place, back=False)

    def state(self, assets: Assets) -> bytes:
        return _rotary_state(self.name, assets)

    def _turned(self, layer: LayerKV, place: Place, back: bool) -> LayerKV:
        positions = torch.arange(place.start, place.start + place.tokens)[None]
        return replace(layer, key=place.assets.rotary.rope.rotate(layer.key[None], positions, back=back)[0])


def power_of(x: Tensor) -> int:
    """The least power of two, at least 0, by which ``x`` has to be divided to lie within +-65504.

    Raises ValueError for NaN and infinities.
    """
    if not x.numel():
        return 0
    low, high = torch.aminmax(x)
    most = max(-low.item(), high.item())
    if not low.isfinite() or not high.isfinite():
        raise ValueError(f"keys or values hold {low.item()} to {high.item()}; allowed are finite numbers")
    power = 0
    while most > LARGEST:
        most, power = most / 2, power + 1
    return power


def _by_head(x: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """``change`` of every head in float32: working copies are of some tokens of one head and not of all."""
    found = torch.empty(x.shape, dtype=torch.float32)
    for head, own in enumerate(x):
        for start in range(0, len(own), _TOKENS):
            found[head, start : start + _TOKENS] = change(own[start : start + _TOKENS].float(), head)
    return found


def _both(layer: LayerKV, change: Any) -> LayerKV:
    return replace(layer, key=change(layer.key, 0), value=change(layer.value, 1))


@lru_cache(maxsize=8)
def _turn(head_dim: int) -> Tensor:
    return rotation(head_dim)


@lru_cache(maxsize=512)
def _signs(seed: int, layer: int, heads: int, head_dim: int) -> Tensor:
    """+-1, [heads, 1, head_dim]."""
    rows = []
    for head in range(heads):
        generator = torch.Generator().manual_seed(seed ^ (layer << 16) ^ head)
        rows.append(2.0 * torch.randint(0, 2, (1, head_dim), generator=generator) - 1)
    return torch.stack(rows)


def _of(maps: Tensor, place: Place) -> Tensor:
    """Of keys and values in a layer."""
    return maps[:, place.layer]


def _apply(x: Tensor, matrix: Tensor) -> Tensor:
    """Of one head: a matrix, or a scale for each channel."""
    return torch.matmul(x, matrix) if matrix.ndim == 2 else x * matrix


def _rotary_state(name: str, assets: Assets) -> bytes:
    if assets.rotary is None:
        raise ValueError(f"transform {name} needs the model: pass assets=Assets(rotary=RotaryKeys.of(model))")
    return assets.rotary.digest
