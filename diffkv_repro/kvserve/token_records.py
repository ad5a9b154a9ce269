"""``Records``: stored tokens of one tier as the bytes that they are in DiffKV's pages, without the pages.

The body of a layer: how many tokens each head has in each tier, int32 [kv_heads, tiers]; then for each tier the records
of its tokens, head by head in the order of their slots, as six streams: key codes, value codes, key scales, value
scales, scores, positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from diffkv_repro.core.precision import Precision
from diffkv_repro.core.vectors import VectorCodec
from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.codecs import CodecError
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter

_SIDES = torch.float16, torch.float16, torch.float32, torch.int32  # scales of keys and values, scores, positions


@dataclass(frozen=True)
class Records:
    """Tokens of a tier, uint8 [n, bytes of each part] in the order of the pages' segments."""

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor
    scores: Tensor
    positions: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor, score: Tensor, position: Tensor, precision: Precision) -> Self:
        """Quantise ``key`` and ``value`` [n, head_dim], as pages have it."""
        parts = []
        for rows, codec in zip((key, value), codecs_of(precision, key.shape[1]), strict=True):
            codes, params = codec.encode(rows if codec.bits == 16 else rows.float())
            pairs = torch.stack(params.chunk(2, dim=-1), dim=-1).flatten(-2)  # scale and zero point of a group together
            parts += [codes.contiguous().view(torch.uint8), _bytes(pairs)]
        return cls(*parts, _bytes(score.float()[:, None]), _bytes(position.to(torch.int32)[:, None]))

    def vectors(self, precision: Precision, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [n, head_dim] that the codes stand for."""
        sides = ((self.keys, self.key_scales), (self.values, self.value_scales))
        found = []
        for (codes, pairs), codec in zip(sides, codecs_of(precision, head_dim), strict=True):
            params = _numbers(pairs, torch.float16).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            found.append(codec.decode(codes, params, dtype))
        return found[0], found[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All six, in the order of a page's segments."""
        return self.keys, self.key_scales, self.values, self.value_scales, self.scores, self.positions


def write_records(streams: StreamWriter, counts: Tensor, records: Sequence[Records]) -> None:
    """Counts int32 [kv_heads, tiers], then the records of each tier: the body of a layer."""
    streams.meta(counts)
    for own in records:
        streams.codes(own.keys, 256)
        streams.codes(own.values, 256)
        for part, dtype in zip((own.key_scales, own.value_scales, own.scores, own.positions), _SIDES, strict=True):
            streams.numbers(_numbers(part.cpu(), dtype), codes=False)


def read_records(streams: StreamReader, place: Place, precisions: Sequence[Precision]) -> tuple[Tensor, list[Records]]:
    """What :func:`write_records` wrote. Raises CodecError for counts, numbers and positions that no prompt has."""
    heads, tokens, head_dim = place.shape
    counts = streams.meta((heads, len(precisions)), torch.int32).long()
    if bool((counts < 0).any()) or bool((counts.sum(dim=1) > tokens).any()):
        raise CodecError(f"heads say that they hold {counts.tolist()} tokens; each has at most {tokens}")
    records = []
    for precision, count in zip(precisions, counts.sum(dim=0).tolist(), strict=True):
        keys, values = codecs_of(precision, head_dim)
        codes = [streams.codes((count, codec.code_bytes), 256) for codec in (keys, values)]
        sides = [
            _bytes(streams.numbers((count, width), dtype))
            for width, dtype in zip((keys.params, values.params, 1, 1), _SIDES, strict=True)
        ]
        records.append(Records(codes[0], sides[0], codes[1], sides[1], *sides[2:]))
    _require_sound(counts, records, place, precisions)
    return counts, records


def _require_sound(counts: Tensor, records: Sequence[Records], place: Place, precisions: Sequence[Precision]) -> None:
    heads, tokens, _ = place.shape
    seen = torch.zeros(heads * tokens, dtype=torch.long)
    for tier, (own, precision) in enumerate(zip(records, precisions, strict=True)):
        scores, at = own.scores.view(torch.float32)[:, 0], own.positions.view(torch.int32)[:, 0].long() - place.start
        if bool(((at < 0) | (at >= tokens)).any()):
            raise CodecError(f"a position of tier {tier} is not one of the {tokens} from {place.start} on")
        if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
            raise CodecError(f"a score of tier {tier} is negative or not finite")
        halves = [own.key_scales, own.value_scales]
        halves += [side for side, bits in ((own.keys, precision.key_bits), (own.values, precision.value_bits))
                   if bits == 16]  # fmt: skip
        if not all(bool(torch.isfinite(_numbers(part, torch.float16)).all()) for part in halves):
            raise CodecError(f"a number of tier {tier} is not finite")
        head = torch.repeat_interleave(torch.arange(heads), counts[:, tier])
        seen += torch.bincount(head * tokens + at, minlength=heads * tokens)
    if bool((seen > 1).any()):
        raise CodecError("a head holds two tokens of one position")


def codecs_of(precision: Precision, head_dim: int) -> tuple[VectorCodec, VectorCodec]:
    """How pages store keys and values of a precision: 16 bits are FP16, whatever the model computes in."""
    return (
        VectorCodec(head_dim, precision.key_bits, precision.key_groups),
        VectorCodec(head_dim, precision.value_bits, precision.value_groups),
    )


def _bytes(rows: Tensor) -> Tensor:
    """[n, k] as uint8 [n, k * element size]."""
    rows = rows.contiguous()
    if not rows.numel():
        return torch.empty(len(rows), rows.shape[1] * rows.element_size(), dtype=torch.uint8, device=rows.device)
    return rows.view(torch.uint8)


def _numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_bytes`."""
    if not rows.numel():
        return torch.empty(len(rows), rows.shape[1] // dtype.itemsize, dtype=dtype, device=rows.device)
    # A copy: columns of a record begin at any byte of it, and even a single row keeps the record's stride.
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
