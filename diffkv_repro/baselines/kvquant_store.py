"""Where KVQuant keeps tokens: as bytes, or as what the bytes stand for."""

import torch
from torch import Tensor

from diffkv_repro.baselines.columns import Columns
from diffkv_repro.baselines.kvquant_codec import Codec, Coded
from diffkv_repro.cache.layer import Place
from diffkv_repro.cache.transforms import KeyTransform
from diffkv_repro.core.packing import pack, unpack


class Simulated:
    """Keys, after RoPE again, and values as they are after dequantisation, all columns."""

    def __init__(self, codec: Codec, place: Place, bits: int, sink: int, first: int) -> None:
        self.codec = codec
        self._place = place
        self._key: Columns | None = None
        self._value: Columns | None = None

    def append(self, coded: Coded, sink: Tensor | None, positions: Tensor, transform: KeyTransform) -> None:
        """Store tokens; those where ``sink`` [batch, tokens] is True as they are."""
        codec, dtype = self.codec, self._place.dtype
        key = torch.where(coded.key_outlier, coded.key.to(dtype), codec.keys(coded.key_codes, dtype))
        exact = coded.value.gather(-1, coded.value_outlier.long())
        value = codec.values(coded.value_codes, coded.value_range, coded.value_outlier, exact, dtype)
        if sink is not None:
            key = torch.where(sink[..., None], coded.key.to(dtype), key)
            value = torch.where(sink[..., None], coded.value.to(dtype), value)
        key, value = by_heads(key, self._place), by_heads(value, self._place)
        key = transform.inverse(key, positions)
        if self._key is None:
            self._key, self._value = Columns(key), Columns(value)
        else:
            self._key.append(key)
            self._value.append(value)

    def view(self, starts: list[int], positions: Tensor, transform: KeyTransform) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values, [batch, kv_heads, columns, head_dim]."""
        return self._key.tensor, self._value.tensor

    def select(self, rows: Tensor) -> None:
        self.codec.select(rows)
        self._key.select(rows)
        self._value.select(rows)

    def tensors(self) -> list[Tensor]:
        return []


class Packed:
    """The bytes. Columns before ``first`` hold sinks and padding only and have no codes; keys are before RoPE."""

    def __init__(self, codec: Codec, place: Place, bits: int, sink: int, first: int) -> None:
        batch, _, width = codec.key_range.shape
        self.codec = codec
        self._place, self._bits, self._sink, self._first, self._width = place, bits, sink, first, width
        self._columns = 0
        self._sinks = torch.zeros(2, batch, sink, width, dtype=codec.half, device=place.device)
        self._held = [0] * batch  # sinks of each sequence
        # Codes of keys and of values, then range, outliers and places of outliers of values: [batch, columns, ...].
        self._parts: list[Tensor] = []
        # Outlier keys of each sequence, and where they are: column * width + channel.
        self._exact = [torch.empty(0, dtype=codec.half, device=place.device)] * batch
        self._index = [torch.empty(0, dtype=torch.int32, device=place.device)] * batch

    def append(self, coded: Coded, sink: Tensor | None, positions: Tensor, transform: KeyTransform) -> None:
        """Store tokens; those where ``sink`` [batch, tokens] is True apart."""
        before, self._columns = self._columns, self._columns + coded.key.shape[1]
        if sink is not None:
            self._keep(coded, sink)
        fresh = [
            pack(coded.key_codes, self._bits),
            pack(coded.value_codes, self._bits),
            coded.value_range,
            coded.value.gather(-1, coded.value_outlier.long()),
            coded.value_outlier,
        ]
        fresh = [part[:, max(0, self._first - before) :] for part in fresh]
        if self._parts:
            fresh = [torch.cat(pair, dim=1) for pair in zip(self._parts, fresh, strict=True)]
        self._parts = [part.clone() for part in fresh]
        for row, outlier in enumerate(coded.key_outlier):
            flat = outlier.flatten().nonzero().flatten()
            self._exact[row] = torch.cat([self._exact[row], coded.key[row].flatten()[flat]])
            self._index[row] = torch.cat([self._index[row], (flat + before * self._width).to(torch.int32)])

    def view(self, starts: list[int], positions: Tensor, transform: KeyTransform) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values, [batch, kv_heads, columns, head_dim]."""
        dtype, first = self._place.dtype, min(self._first, self._columns)
        key = torch.zeros(len(starts), self._columns, self._width, dtype=dtype, device=self._place.device)
        value = torch.zeros_like(key)
        key_codes, value_codes, span, exact, index = self._parts
        key[:, first:] = self.codec.keys(unpack(key_codes, self._bits, self._width), dtype)
        value[:, first:] = self.codec.values(unpack(value_codes, self._bits, self._width), span, index, exact, dtype)
        for row, (start, held) in enumerate(zip(starts, self._held, strict=True)):
            key[row].view(-1)[self._index[row].long()] = self._exact[row].to(dtype)
            key[row, start : start + held], value[row, start : start + held] = self._sinks[:, row, :held].to(dtype)
        return transform.inverse(by_heads(key, self._place), positions), by_heads(value, self._place)

    def select(self, rows: Tensor) -> None:
        order = rows.tolist()
        self.codec.select(rows)
        self._sinks = self._sinks.index_select(1, rows)
        self._parts = [part.index_select(0, rows) for part in self._parts]
        self._held = [self._held[row] for row in order]
        # A sequence that goes on twice needs its outliers twice: from here on they change apart.
        self._exact = [self._exact[row].clone() for row in order]
        self._index = [self._index[row].clone() for row in order]

    def tensors(self) -> list[Tensor]:
        return [*self.codec.tensors(), self._sinks, *self._parts, *self._exact, *self._index]

    def _keep(self, coded: Coded, sink: Tensor) -> None:
        """Sinks are the first tokens of a sequence; after a very short prompt they come one by one."""
        for row, chosen in enumerate(sink):
            at = self._held[row]
            self._held[row] += int(chosen.sum())
            self._sinks[0, row, at : self._held[row]] = coded.key[row, chosen]
            self._sinks[1, row, at : self._held[row]] = coded.value[row, chosen]


def by_heads(tokens: Tensor, place: Place) -> Tensor:
    """[batch, tokens, width] as [batch, kv_heads, tokens, head_dim], laid out anew: it decides how products round."""
    return tokens.unflatten(-1, (place.layout.kv_heads, -1)).transpose(1, 2).contiguous()
