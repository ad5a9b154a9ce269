"""Importance score -> precision ladder: heads, layers or tokens, the important ones in more levels (KVServe, MixHQ).

KVServe describes three granularities of one idea. A unit's rank decides its step; a step of zero bits prunes, which is
what DuoAttention (heads), PyramidKV (layers) and SnapKV (tokens) do.
"""

import re
from abc import abstractmethod
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.grids import AXES, AXIS_PAIR, KEPT, Grid, require_levels_of
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.quantizers import QUANTIZERS, Quantizer
from diffkv_repro.kvserve.registry import require_choice, require_share, require_whole, short
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

Steps = tuple[tuple[int, int], ...]
_STEP = re.compile(r"([\d.e-]+):(?:(16bit)|K(\d+)V(\d+)|0)")  # a share and its levels, as ladders are written


@dataclass(frozen=True)
class Ladder(Quantizer):
    """``steps`` are (key levels, value levels), best first; ``shares`` of the units go to each and add up to 1.

    The first ``sink`` and the last ``recent`` tokens are always in the first step. 0 levels drop what is in them;
    a step drops both keys and values or neither.
    """

    steps: Steps = ((12, 8), (6, 4))
    shares: tuple[float, ...] = (0.2, 0.8)
    sink: int = 0
    recent: int = 0
    key_axis: str = "channel"
    value_axis: str = "token"

    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        well = isinstance(self.steps, tuple) and all(isinstance(step, tuple) and len(step) == 2 for step in self.steps)
        if not well or not 1 <= len(self.steps) <= 16:
            raise ValueError(f"steps is {self.steps!r}; allowed are 1 to 16 pairs (key levels, value levels)")
        for key, value in self.steps:
            require_levels_of("key levels", key)
            require_levels_of("value levels", value)
            if (key == 0) != (value == 0):
                raise ValueError(f"a step is {(key, value)}; 0 levels drop keys and values together")
        if any(low > high for better, worse in pairwise(self.steps)
               for high, low in zip(better, worse, strict=True)):  # fmt: skip
            raise ValueError(f"steps are {self.steps!r}; they must not rise: the best comes first")
        if not isinstance(self.shares, tuple) or len(self.shares) != len(self.steps):
            raise ValueError(f"shares is {self.shares!r}; one is needed for each of {len(self.steps)} steps")
        for share in self.shares:
            require_share("share", share)
        if abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError(f"shares add up to {sum(self.shares):g}; it must be 1")
        require_whole("sink", self.sink, 0)
        require_whole("recent", self.recent, 0)
        for name in ("key_axis", "value_axis"):
            require_choice(name, getattr(self, name), AXES)

    def grids(self, step: int) -> tuple[Grid, Grid]:
        """Of keys and values in a step."""
        key, value = self.steps[step]
        return Grid(key, self.key_axis, joint=self.joint), Grid(value, self.value_axis, joint=self.joint)

    def protected(self, tokens: int) -> tuple[int, int]:
        """How many first and how many last tokens are in the first step, whatever their rank."""
        sink = min(self.sink, tokens)
        return sink, min(self.recent, tokens - sink)

    @classmethod
    def words(cls, text: str) -> dict[str, Any]:
        found = [_STEP.fullmatch(word) for word in text.split()]
        rest = super().words(" ".join(word for word, step in zip(text.split(), found, strict=True) if not step))
        steps = [step.groups() for step in found if step]
        if not steps:
            return rest
        levels = [[0, 0] if not key and not kept else [KEPT, KEPT] if kept else [int(key), int(value)]
                  for _, kept, key, value in steps]  # fmt: skip
        return rest | {"steps": levels, "shares": [float(share) for share, *_ in steps]}

    def __str__(self) -> str:
        steps = [f"{short(share)}:{_step(*pair)}" for share, pair in zip(self.shares, self.steps, strict=True)]
        others = [item for item in fields(self) if item.name not in ("steps", "shares")]
        changed = [item.name for item in others if getattr(self, item.name) != item.default]
        return " ".join([self.name, *steps, *(f"{name}={getattr(self, name)}" for name in changed)])


@dataclass(frozen=True)
class _Whole(Ladder):
    """A ladder whose units are whole heads of a layer, for all tokens that are not protected."""

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        step = self.steps_of(place)
        streams.small(step.to(torch.uint8), len(self.steps))
        for index, heads, sink, stop in self._runs(step, place.tokens):
            for grid, tensor in zip(self.grids(index), (layer.key, layer.value), strict=True):
                grid.write(tensor[heads, sink:stop], streams, place.half)
        low, (sink, recent) = (step > 0).nonzero()[:, 0], self.protected(place.tokens)
        for grid, tensor in zip(self.grids(0), (layer.key, layer.value), strict=True):
            ends = torch.cat([tensor[low, :sink], tensor[low, place.tokens - recent :]], dim=1)
            grid.write(ends, streams, place.half)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        heads, tokens, channels = place.shape
        step = streams.small((heads,), len(self.steps)).long()
        found = torch.zeros(2, *place.shape, dtype=place.dtype)
        kept = torch.ones(heads, tokens, dtype=torch.bool)
        for index, chosen, sink, stop in self._runs(step, tokens):
            for part, grid in zip(found, self.grids(index), strict=True):
                part[chosen, sink:stop] = grid.read(
                    (len(chosen), stop - sink, channels), streams, place.half, place.dtype
                )
            kept[chosen, sink:stop] = self.steps[index][0] > 0
        low, (sink, recent) = (step > 0).nonzero()[:, 0], self.protected(tokens)
        ends = torch.cat([torch.arange(sink), torch.arange(tokens - recent, tokens)])
        for part, grid in zip(found, self.grids(0), strict=True):
            part[low[:, None], ends] = grid.read((len(low), len(ends), channels), streams, place.half, place.dtype)
        return LayerKV(*found, None if bool(kept.all()) else kept)

    @abstractmethod
    def steps_of(self, place: Place) -> Tensor:
        """The step of each head of a layer, int64 [kv_heads]."""

    def _runs(self, step: Tensor, tokens: int) -> list[tuple[int, Tensor, int, int]]:
        """Step, its heads, and the tokens that it holds of them: from, to."""
        sink, recent = self.protected(tokens)
        runs = []
        for index in range(len(self.steps)):
            heads = (step == index).nonzero()[:, 0]
            if len(heads):
                runs.append((index, heads, *((sink, tokens - recent) if index else (0, tokens))))
        return runs


@QUANTIZERS.add
@dataclass(frozen=True)
class HeadLadder(_Whole):
    """Heads by their scores over the whole model. DuoAttention: 16 bits, and nothing but sink and recent tokens."""

    name: ClassVar[str] = "heads"
    format_id: ClassVar[int] = 5
    ranks_heads: ClassVar[bool] = True

    def steps_of(self, place: Place) -> Tensor:
        scores = place.assets.heads
        if scores is None:
            raise ValueError(f"quantizer {self.name} ranks heads: pass assets=Assets(heads=score_heads(model))")
        scores.require(place.layout)
        return assign(scores.tensor.flatten(), self.shares).view(scores.tensor.shape)[place.layer]


@QUANTIZERS.add
@dataclass(frozen=True)
class LayerLadder(_Whole):
    """Layers by ``Assets.layer_scores``; without any, earlier layers count as more important, as in KVServe's code."""

    name: ClassVar[str] = "layers"
    format_id: ClassVar[int] = 6

    def steps_of(self, place: Place) -> Tensor:
        given = place.assets.layer_scores
        count = place.layout.layers
        scores = -torch.arange(count).float() if given is None else torch.as_tensor(given, dtype=torch.float32)
        if scores.shape != (count,):
            raise ValueError(f"layer_scores are {tuple(scores.shape)}; the layout has {count} layers")
        return assign(scores, self.shares)[place.layer].expand(place.layout.kv_heads)


@QUANTIZERS.add
@dataclass(frozen=True)
class MixHQ(Quantizer):
    """KVServe's mixed head-wise quantizer: the lowest ``ratio`` of all heads get the low levels.

    Defaults are KVServe's default profile. Every head keeps all its tokens.
    """

    ratio: float = 0.8
    key_high: int = 12
    key_low: int = 6
    value_high: int = 8
    value_low: int = 4
    key_axis: str = "channel"
    value_axis: str = "token"
    name: ClassVar[str] = "mixhq"
    format_id: ClassVar[int] = 4
    ranks_heads: ClassVar[bool] = True
    shorthand = (
        (r"r=(\S+)", ("ratio",)),
        (r"K(\d+)/(\d+)", ("key_high", "key_low")),
        (r"V(\d+)/(\d+)", ("value_high", "value_low")),
        (AXIS_PAIR, ("key_axis", "value_axis")),
    )

    def __post_init__(self) -> None:
        require_share("ratio", self.ratio)
        for name in ("key_high", "key_low", "value_high", "value_low"):
            require_whole(name, getattr(self, name), 2, 256)
        for kind in ("key", "value"):
            high, low = getattr(self, f"{kind}_high"), getattr(self, f"{kind}_low")
            if high < low:
                raise ValueError(f"{kind}_high is {high} and {kind}_low {low}; high must be at least low")
        _ = self.ladder

    @property
    def ladder(self) -> HeadLadder:
        """The same as a ladder of two steps."""
        steps = ((self.key_high, self.value_high), (self.key_low, self.value_low))
        shares = (1 - self.ratio, self.ratio)
        return HeadLadder(steps, shares, key_axis=self.key_axis, value_axis=self.value_axis)

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        self.ladder.encode(layer, place, streams)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        return self.ladder.decode(place, streams)

    def __str__(self) -> str:
        line = f"{self.name} r={short(self.ratio)} K{self.key_high}/{self.key_low} V{self.value_high}/{self.value_low}"
        default = (self.key_axis, self.value_axis) == ("channel", "token")
        return line if default else f"{line} {self.key_axis}/{self.value_axis}"


def assign(scores: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Steps int64 [n] of units with ``scores`` [n]: the lowest round(share n) are in the last step, and so on up.

    Of equal scores the earlier unit counts as the more important.
    """
    ladder = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(step_counts(shares, len(scores))))
    ranked = scores.argsort(descending=True, stable=True)
    return torch.empty_like(ranked).scatter_(0, ranked, ladder)


def step_counts(shares: tuple[float, ...], units: int) -> list[int]:
    """Units of each step, counted from the lowest, so that MixHQ's low heads are round(ratio n)."""
    edges, below = [0], 0.0
    for share in reversed(shares[1:]):
        below += share
        edges.append(round(below * units))
    edges.append(units)
    return [above - under for under, above in pairwise(edges)][::-1]


def _step(key: int, value: int) -> str:
    if not key:
        return "0"
    return "16bit" if (key, value) == (KEPT, KEPT) else f"K{key}V{value}"
