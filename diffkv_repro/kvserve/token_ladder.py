"""Tokens by importance: SnapKV, PyramidKV and what lies between keeping and dropping."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.codecs import CodecError
from diffkv_repro.kvserve.grids import Grid
from diffkv_repro.kvserve.ladders import Ladder, step_counts
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.quantizers import QUANTIZERS
from diffkv_repro.kvserve.registry import require_share, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter


@QUANTIZERS.add
@dataclass(frozen=True)
class TokenLadder(Ladder):
    """Tokens by ``Assets.token_scores``, as many of each head in a step. SnapKV: 16 bits or nothing.

    ``budget`` tokens in the first step replace the shares of a ladder of two steps; with ``beta`` it falls over the
    layers from 2 (budget - recent) - least to least = (budget - recent) / beta, as in PyramidKV. Protected tokens
    count in it.
    """

    budget: int | None = None
    beta: float | None = None
    key_axis: str = "token"
    name: ClassVar[str] = "tokens"
    format_id: ClassVar[int] = 7
    ranks_tokens: ClassVar[bool] = True
    joint: ClassVar[bool] = False  # the tokens of a step differ between heads, so they share nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None:
            require_whole("budget", self.budget, 0)
            if len(self.steps) != 2:
                raise ValueError(f"a budget of {self.budget} is for 2 steps, and there are {len(self.steps)}")
        if self.beta is not None:
            require_share("beta", self.beta, 1.0, 1e6)
            if self.budget is None:
                raise ValueError(f"beta is {self.beta:g}; it spreads a budget, and there is none")

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        step = self.steps_of(place)
        streams.small(step.to(torch.uint8), len(self.steps))
        order, counts = _order(step, len(self.steps))
        for grids, index in self._parts(order, counts):
            for grid, tensor in zip(grids, (layer.key, layer.value), strict=True):
                grid.write(tensor.gather(1, _wide(index, tensor)), streams, place.half)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        heads, _, channels = place.shape
        step = streams.small(place.shape[:2], len(self.steps)).long()
        order, counts = _order(step, len(self.steps))
        found = torch.zeros(2, *place.shape, dtype=place.dtype)
        for grids, index in self._parts(order, counts):
            for part, grid in zip(found, grids, strict=True):
                values = grid.read((heads, index.shape[1], channels), streams, place.half, place.dtype)
                part.scatter_(1, _wide(index, part), values)
        kept = torch.tensor([key > 0 for key, _ in self.steps])[step]
        return LayerKV(*found, None if bool(kept.all()) else kept)

    def steps_of(self, place: Place) -> Tensor:
        """The step of each token, int64 [kv_heads, tokens]."""
        given = place.assets.token_scores
        if given is None:
            raise ValueError(f"quantizer {self.name} ranks tokens: pass assets=Assets(token_scores=[...])")
        scores = torch.as_tensor(given[place.layer]).float().cpu().clone()
        if tuple(scores.shape) != place.shape[:2]:
            raise ValueError(f"token_scores are {tuple(scores.shape)}; {place.shape[:2]} are needed")
        sink, recent = self.protected(place.tokens)
        scores[:, :sink] = torch.inf
        scores[:, place.tokens - recent :] = torch.inf
        if self.budget is None:
            first = max(sink + recent, place.tokens - sum(step_counts(self.shares, place.tokens)[1:]))
        else:
            first = min(place.tokens, max(sink + recent, self._budget(place)))
        rest = place.tokens - first
        tail = sum(self.shares[1:])
        shares = [share / tail for share in self.shares[1:]] if tail else [1.0] + [0.0] * (len(self.steps) - 2)
        counts = [first, *step_counts(tuple(shares), rest)] if len(self.steps) > 1 else [place.tokens]
        ladder = torch.repeat_interleave(torch.arange(len(self.steps)), torch.tensor(counts))
        ranked = scores.argsort(dim=1, descending=True, stable=True)
        return torch.empty_like(ranked).scatter_(1, ranked, ladder.expand_as(ranked))

    def _budget(self, place: Place) -> int:
        layers = place.layout.layers
        if self.beta is None or layers == 1:
            return self.budget
        free = max(0, self.budget - self.recent)
        least = free / self.beta
        most = 2 * free - least
        return self.recent + round(most - (most - least) * place.layer / (layers - 1))

    def _parts(self, order: Tensor, counts: list[int]) -> list[tuple[tuple[Grid, Grid], Tensor]]:
        pieces = order.split(counts, dim=1)
        return [(self.grids(step), index) for step, index in enumerate(pieces) if counts[step]]


def _order(step: Tensor, steps: int) -> tuple[Tensor, list[int]]:
    """Tokens of each head sorted by step, in their own order within one, and how many are in each."""
    counts = torch.stack([(step == index).sum(dim=1) for index in range(steps)], dim=1)
    if bool((counts != counts[0]).any()):
        raise CodecError("heads of a layer differ in how many tokens a step holds")
    return step.argsort(dim=1, stable=True), counts[0].tolist()


def _wide(index: Tensor, like: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])
