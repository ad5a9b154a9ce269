"""Where QAQ keeps tokens: vectors of any number of bits each, with their outliers apart.

A vector of b bits is split into 2**b equal segments between the least and the largest value that are no outliers; what
falls into a segment comes back as its middle. So values are clipped to the middles of the outer segments and then
quantised from minimum to maximum, which puts the levels there.

Keys and values are treated alike, so they stand in one tensor [batch, vectors, columns, head_dim]: the keys of all KV
heads, then the values of all.
"""

import torch
from torch import Tensor

from diffkv_repro.baselines.columns import Columns
from diffkv_repro.core.packing import pack, packed_bytes, unpack
from diffkv_repro.core.quantize import affine, restore

WIDTHS = range(1, 9)


def inner_range(vectors: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Least and largest value [...] of ``vectors`` [..., head_dim] but for ``count`` a side; the channels of those."""
    low, at_low = vectors.float().topk(count + 1, dim=-1, largest=False)
    high, at_high = vectors.float().topk(count + 1, dim=-1)
    return low[..., count], high[..., count], torch.cat([at_low[..., :count], at_high[..., :count]], dim=-1)


def channel_type(head_dim: int) -> torch.dtype:
    """What holds the number of a channel."""
    return torch.uint8 if head_dim <= 256 else torch.int16


class Simulated:
    """Vectors as they are after dequantisation, all columns."""

    def __init__(self, vectors: Tensor, dtype: torch.dtype, outliers: int) -> None:
        self._outliers = outliers
        self._dense = Columns(vectors.to(dtype))

    def append(self, vectors: Tensor) -> None:
        """New columns in 16 bits."""
        self._dense.append(vectors)

    def young(self, first: int, count: int) -> Tensor:
        """``count`` columns that are not quantised yet, from ``first`` on, where the quantised ones end."""
        return self._dense.tensor[:, :, first : first + count]

    def seal(self, first: int, bits: Tensor) -> None:
        """Quantise columns from ``first`` on to ``bits`` uint8 [n, batch, vectors], 0 being padding."""
        there = bits > 0
        column, row, head = there.nonzero(as_tuple=True)
        at = (row, head, first + column)
        self._dense.tensor[at] = self._round_trip(self._dense.tensor[at], bits[there])

    def view(self, bits: Tensor) -> Tensor:
        """Everything dequantised; ``bits`` uint8 [n, batch, vectors] of all columns that are quantised."""
        return self._dense.tensor

    def select(self, rows: Tensor, bits: Tensor) -> None:
        """Keep the sequences ``rows``; ``bits`` as they were before."""
        self._dense.select(rows)

    def tensors(self) -> list[Tensor]:
        return []

    def _round_trip(self, vectors: Tensor, bits: Tensor) -> Tensor:
        clipped, index = _clipped(vectors, bits, self._outliers)
        result = torch.empty_like(vectors)
        for width in bits.unique().tolist():
            chosen = bits == width
            result[chosen] = restore(*affine(clipped[chosen], 2**width), vectors.dtype)
        return result.scatter_(-1, index, vectors.gather(-1, index))


class Packed:
    """The bytes. Quantised vectors are in the order column, sequence, head; the newest columns are in 16 bits."""

    def __init__(self, vectors: Tensor, dtype: torch.dtype, outliers: int) -> None:
        dim = vectors.shape[-1]
        self._dtype, self._outliers, self._dim = dtype, outliers, dim
        self._recent = vectors
        self._codes = {bits: vectors.new_empty(0, packed_bytes(dim, bits), dtype=torch.uint8) for bits in WIDTHS}
        # What every vector has, whatever its bits: scale and zero, outliers and their channels.
        self._params = vectors.new_empty(0, 2, dtype=torch.float16)
        self._exact = vectors.new_empty(0, 2 * outliers)
        self._channel = vectors.new_empty(0, 2 * outliers, dtype=channel_type(dim))

    def append(self, vectors: Tensor) -> None:
        self._recent = torch.cat([self._recent, vectors], dim=2)

    def young(self, first: int, count: int) -> Tensor:
        return self._recent[:, :, :count].to(self._dtype)

    def seal(self, first: int, bits: Tensor) -> None:
        there, count = bits > 0, len(bits)
        vectors, bits = self.young(first, count).permute(2, 0, 1, 3)[there], bits[there]
        self._recent = self._recent[:, :, count:].clone()
        clipped, index = _clipped(vectors, bits, self._outliers)
        params = self._params.new_empty(len(vectors), 2)
        for width in bits.unique().tolist():
            chosen = bits == width
            codes, scale, zero = affine(clipped[chosen], 2**width)
            params[chosen] = torch.stack([scale, zero], dim=-1)
            self._codes[width] = torch.cat([self._codes[width], pack(codes, width)])
        self._params = torch.cat([self._params, params])
        self._exact = torch.cat([self._exact, vectors.gather(-1, index).to(self._exact.dtype)])
        self._channel = torch.cat([self._channel, index.to(self._channel.dtype)])

    def view(self, bits: Tensor) -> Tensor:
        batch, heads, _, dim = self._recent.shape
        there = bits > 0
        flat = bits[there]
        vectors = torch.empty(len(flat), dim, dtype=self._dtype, device=flat.device)
        for width, packed in self._codes.items():
            if len(packed):
                chosen = flat == width
                scale, zero = self._params[chosen].unbind(-1)
                vectors[chosen] = restore(unpack(packed, width, dim), scale, zero, self._dtype)
        vectors.scatter_(-1, self._channel.long(), self._exact.to(self._dtype))
        dense = torch.zeros(len(bits), batch, heads, dim, dtype=self._dtype, device=flat.device)
        dense[there] = vectors
        return torch.cat([dense.permute(1, 2, 0, 3), self._recent.to(self._dtype)], dim=2).contiguous()

    def select(self, rows: Tensor, bits: Tensor) -> None:
        there = bits > 0
        number = (there.flatten().cumsum(0) - 1).view(bits.shape)
        order = number.index_select(1, rows)[there.index_select(1, rows)]
        flat = bits[there]
        for width, packed in self._codes.items():
            slot = (flat == width).cumsum(0) - 1
            self._codes[width] = packed[slot[order][flat[order] == width]]
        self._params, self._exact, self._channel = self._params[order], self._exact[order], self._channel[order]
        self._recent = self._recent.index_select(0, rows)

    def tensors(self) -> list[Tensor]:
        return [self._recent, *self._codes.values(), self._params, self._exact, self._channel]


def _clipped(vectors: Tensor, bits: Tensor, outliers: int) -> tuple[Tensor, Tensor]:
    """Vectors [n, head_dim] within the middles of the outer segments at ``bits`` [n]; places of outliers [n, 2 m]."""
    low, high, index = inner_range(vectors, outliers)
    half = (high - low) / 2.0 ** (bits + 1)
    return torch.clamp(vectors.float(), (low + half)[:, None], (high - half)[:, None]), index
