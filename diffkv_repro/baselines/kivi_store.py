"""Where KIVI keeps keys and values: as bytes, or as what the bytes stand for.

Both take whole runs of columns from FP16 to codes when they are told to; when that is, ``kivi`` knows.
"""

from typing import Protocol

import torch
from torch import Tensor

from diffkv_repro.baselines.columns import Columns
from diffkv_repro.core.packing import pack, packed_bytes, unpack
from diffkv_repro.core.quantize import Axis, Quantized, dequantize, quantize

Span = tuple[slice, int, int, int]  # sequences, the column they start in, and the columns from .. to


class Scheme(Protocol):
    """``bits`` of a code, ``group`` of tokens or channels with one scale, ``residual`` tokens in 16 bits."""

    @property
    def bits(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def residual(self) -> int: ...


class Simulated:
    """Keys and values as they are after dequantisation, all columns."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype, key: Tensor, value: Tensor) -> None:
        self._scheme = scheme
        self._key, self._value = Columns(key.to(dtype)), Columns(value.to(dtype))

    def append(self, key: Tensor, value: Tensor) -> None:
        """New columns in 16 bits, [batch, kv_heads, n, head_dim]."""
        self._key.append(key)
        self._value.append(value)

    def seal_keys(self, spans: list[Span]) -> None:
        """Quantise whole residuals, which follow what is quantised of their sequence."""
        for rows, _, first, last in spans:
            part = self._key.tensor[rows, :, first:last]
            part.copy_(round_trip(part, self._scheme, "channel"))

    def seal_values(self, first: int, last: int) -> None:
        """Quantise the oldest columns in 16 bits, which are those from ``first`` to ``last``."""
        if last > first:
            part = self._value.tensor[:, :, first:last]
            part.copy_(round_trip(part, self._scheme, "token"))

    def view(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_heads, columns, head_dim]; ``starts`` are the first columns of the sequences."""
        return self._key.tensor, self._value.tensor

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order."""
        self._key.select(rows)
        self._value.select(rows)

    def trim(self, starts: list[int]) -> None:
        pass

    def tensors(self) -> list[Tensor]:
        return []


class Packed:
    """The bytes. Quantised keys are counted from the start of their sequence, all else stands in its column."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype, key: Tensor, value: Tensor) -> None:
        batch, kv_heads, _, dim = key.shape
        self._scheme, self._dtype, self._dim = scheme, dtype, dim
        self._columns = key.shape[2]
        self._sealed = [0] * batch  # keys of each sequence that are quantised
        self._key, self._value = key, value  # in 16 bits, the newest columns
        self._key_codes, self._value_codes = (
            key.new_empty(batch, kv_heads, 0, packed_bytes(dim, scheme.bits), dtype=torch.uint8) for _ in range(2)
        )
        groups = -(-dim // scheme.group)
        self._key_params = key.new_empty(2, batch, kv_heads, 0, dim, dtype=torch.float16)
        self._value_params = key.new_empty(2, batch, kv_heads, 0, groups, dtype=torch.float16)

    def append(self, key: Tensor, value: Tensor) -> None:
        self._columns += key.shape[2]
        self._key, self._value = torch.cat([self._key, key], dim=2), torch.cat([self._value, value], dim=2)

    def seal_keys(self, spans: list[Span]) -> None:
        group, hidden = self._scheme.group, self._columns - self._key.shape[2]
        tokens = max((last - start for _, start, _, last in spans), default=0)
        missing = max(0, tokens - self._key_codes.shape[2])
        self._key_codes = torch.nn.functional.pad(self._key_codes, (0, 0, 0, missing))
        self._key_params = torch.nn.functional.pad(self._key_params, (0, 0, 0, missing // group))
        for rows, start, first, last in spans:
            part = self._key[rows, :, first - hidden : last - hidden].to(self._dtype)
            stored = _quantise(part, self._scheme, "channel")
            self._key_codes[rows, :, first - start : last - start] = pack(stored.codes.contiguous(), self._scheme.bits)
            groups = slice((first - start) // group, (last - start) // group)
            self._key_params[0, rows, :, groups], self._key_params[1, rows, :, groups] = stored.scale, stored.zero
            self._sealed[rows] = [last - start] * len(self._sealed[rows])

    def seal_values(self, first: int, last: int) -> None:
        if last == first:
            return
        stored = _quantise(self._value[:, :, : last - first].to(self._dtype), self._scheme, "token")
        self._value = self._value[:, :, last - first :].clone()
        codes, params = pack(stored.codes, self._scheme.bits), torch.stack([stored.scale, stored.zero])
        self._value_codes = torch.cat([self._value_codes, codes], dim=2)
        self._value_params = torch.cat([self._value_params, params], dim=3)

    def view(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        value = self._restored(self._value_codes, self._value_params, "token")
        return self._keys(starts), torch.cat([value, self._value.to(self._dtype)], dim=2)

    def select(self, rows: Tensor) -> None:
        for name in ("_key", "_value", "_key_codes", "_value_codes"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
        for name in ("_key_params", "_value_params"):
            setattr(self, name, getattr(self, name).index_select(1, rows))
        self._sealed = [self._sealed[row] for row in rows.tolist()]

    def trim(self, starts: list[int]) -> None:
        """Let go of what no sequence needs."""
        keys = max(self._sealed)
        kept = self._columns - min(start + sealed for start, sealed in zip(starts, self._sealed, strict=True))
        # Clones: a slice would keep all it was cut from.
        self._key = self._key[:, :, self._key.shape[2] - kept :].clone()
        if keys < self._key_codes.shape[2]:
            self._key_codes = self._key_codes[:, :, :keys].clone()
            self._key_params = self._key_params[:, :, :, : keys // self._scheme.group].clone()

    def tensors(self) -> list[Tensor]:
        return [self._key, self._value, self._key_codes, self._key_params, self._value_codes, self._value_params]

    def _keys(self, starts: list[int]) -> Tensor:
        old = self._restored(self._key_codes, self._key_params, "channel")
        batch, kv_heads, _, dim = self._key.shape
        dense = torch.zeros(batch, kv_heads, self._columns, dim, dtype=self._dtype, device=old.device)
        hidden = self._columns - self._key.shape[2]
        blocks = [(start, start, start + sealed) for start, sealed in zip(starts, self._sealed, strict=True)]
        for rows, _, first, last in together(blocks):
            dense[rows, :, first:last] = old[rows, :, : last - first]
            dense[rows, :, last:] = self._key[rows, :, last - hidden :]
        return dense

    def _restored(self, codes: Tensor, params: Tensor, axis: Axis) -> Tensor:
        if codes.shape[2] == 0:
            return codes.new_empty(*codes.shape[:3], self._dim, dtype=self._dtype)
        unpacked = unpack(codes, self._scheme.bits, self._dim)
        size = self._scheme.group if axis == "channel" else min(self._scheme.group, self._dim)
        return dequantize(Quantized(unpacked, params[0], params[1], 2**self._scheme.bits, axis, size), self._dtype)


def together(spans: list[tuple[int, int, int]]) -> list[Span]:
    """One span for all sequences where they agree, as they do without padding; else one for each."""
    if all(span == spans[0] for span in spans):
        return [(slice(None), *spans[0])]
    return [(slice(row, row + 1), *span) for row, span in enumerate(spans)]


def _quantise(part: Tensor, scheme: Scheme, axis: Axis) -> Quantized:
    return quantize(part, 2**scheme.bits, axis=axis, group=scheme.group)


def round_trip(part: Tensor, scheme: Scheme, axis: Axis) -> Tensor:
    """``part`` [..., tokens, channels] as it comes back from its codes, which ``axis`` shares scales along."""
    return dequantize(_quantise(part, scheme, axis), part.dtype)
