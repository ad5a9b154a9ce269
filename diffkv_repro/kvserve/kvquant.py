"""KVQuant (Hooper et al., NeurIPS 2024): levels where the values are, and the few that lie far out kept as they are."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diffkv_repro.core.codebook import fit, look_up, nearest
from diffkv_repro.core.quantize import LARGEST
from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.codecs import CodecError
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.quantizers import QUANTIZERS, Quantizer
from diffkv_repro.kvserve.registry import require_share, require_whole, short
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter


@QUANTIZERS.add
@dataclass(frozen=True)
class KVQuant(Quantizer):
    """Keys per channel, values per token, ``levels`` of one codebook for keys and one for values in every layer.

    A share of ``outliers`` lies beyond the ranges and is stored sparsely in 16 bits; the first ``sink`` tokens stay in
    16 bits. KVQuant takes keys before RoPE: put the transform ``unrope`` in front. Codebooks come from the request
    itself (k-means, errors in the units of keys and values), not from Fisher-weighted calibration. What lies within
    its range is off by at most half the widest gap of the codebook times the half range.
    """

    levels: int = 16
    outliers: float = 0.01
    sink: int = 1
    name: ClassVar[str] = "kvquant"
    format_id: ClassVar[int] = 9
    shorthand = ((r"nuq(\d+)", ("levels",)), (r"(\S+) outliers", ("outliers",)))

    def __post_init__(self) -> None:
        require_whole("levels", self.levels, 2, 256)
        require_share("outliers", self.outliers, 0.0, 0.5)
        require_whole("sink", self.sink, 0)

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        sink = min(self.sink, place.tokens)
        for dim, tensor in ((0, layer.key), (1, layer.value)):
            streams.numbers(tensor[:, :sink].to(place.half))
            if place.tokens > sink:
                self._write(tensor[:, sink:].permute(1, 0, 2).flatten(1).float(), dim, place, streams)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        heads, tokens, channels = place.shape
        sink = min(self.sink, tokens)
        found = []
        for dim in (0, 1):
            first = streams.numbers((heads, sink, channels), place.half).float()
            if tokens > sink:
                flat = self._read((tokens - sink, heads * channels), dim, place, streams)
                first = torch.cat([first, flat.view(-1, heads, channels).permute(1, 0, 2)], dim=1)
            found.append(first.clamp_(-LARGEST, LARGEST).to(place.dtype))
        return LayerKV(*found)

    def _write(self, x: Tensor, dim: int, place: Place, streams: StreamWriter) -> None:
        """``x`` [tokens, width], whose ranges are along ``dim``."""
        low, high = (_edge(x, self.outliers / 2, dim), -_edge(-x, self.outliers / 2, dim))
        centre = ((low + high) / 2).half()
        reach = torch.maximum(high - centre.float(), centre.float() - low).clamp_min(0)
        # Wider by a rounding of FP16, so that what is inside stays inside.
        width = (reach * (1 + 2**-10)).clamp(max=LARGEST).half()
        apart, scale = centre.float().unsqueeze(dim), width.float().unsqueeze(dim)
        normal = (x - apart) / torch.where(scale > 0, scale, 2.0**-24)
        inside = normal.abs() <= 1
        weights = torch.where(inside, (scale**2).expand_as(x), 0.0)
        book = fit(normal.clamp(-1, 1).flatten(), weights.flatten(), self.levels)
        for param in (centre, width, book):
            streams.meta(param)
        out = ~inside
        streams.codes(nearest(normal.clamp(-1, 1)[None], book[None])[0].masked_fill_(out, 0), self.levels)
        streams.meta(out.sum(dim=1).to(torch.int32))
        streams.meta(out.nonzero()[:, 1].to(_index(x.shape[1])))
        streams.numbers(x[out].to(place.half))

    def _read(self, shape: tuple[int, int], dim: int, place: Place, streams: StreamReader) -> Tensor:
        tokens, width = shape
        centre, reach = (streams.meta((shape[1 - dim],), torch.float16).float().unsqueeze(dim) for _ in range(2))
        book = streams.meta((self.levels,), torch.float16)
        codes = streams.codes(shape, self.levels)
        x = centre + reach * look_up(codes[None], book[None])[0]
        counts = streams.meta((tokens,), torch.int32).long()
        if bool((counts < 0).any()) or bool((counts > width).any()):
            raise CodecError(f"a token has more outliers than its {width} channels")
        total = int(counts.sum())
        column = streams.meta((total,), _index(width)).long()
        if total and not 0 <= int(column.min()) <= int(column.max()) < width:
            raise CodecError(f"an outlier is in channel {int(column.max())} of {width}")
        row = torch.repeat_interleave(torch.arange(tokens), counts)
        x[row, column] = streams.numbers((total,), place.half).float()
        return x

    def __str__(self) -> str:
        return f"{self.name} nuq{self.levels} {short(self.outliers)} outliers sink={self.sink}"


def _index(width: int) -> torch.dtype:
    return torch.int16 if width <= 2**15 else torch.int32


def _edge(x: Tensor, share: float, dim: int) -> Tensor:
    """Lower quantile ``share`` along ``dim``, linear between two values."""
    place = share * (x.shape[dim] - 1)
    below = int(place)
    least = x.topk(min(below + 2, x.shape[dim]), dim=dim, largest=False).values
    return torch.lerp(least.select(dim, below), least.select(dim, -1), place - below)
