"""``VectorCodec``: key or value vectors <-> the bytes that stand for them at one precision."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.core.packing import pack, packed_bytes, unpack
from diffkv_repro.core.precision import BITS
from diffkv_repro.core.quantize import affine, require_half_range, restore


@dataclass(frozen=True)
class VectorCodec:
    """Vectors of ``head_dim`` channels in ``bits`` bits with ``groups`` scale groups.

    16 bits are kept as ``half`` (float16, or bfloat16 for a model that computes in it) without scales.
    Raises ValueError where groups do not divide head_dim.
    """

    head_dim: int
    bits: int
    groups: int = 1
    half: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}; allowed are {', '.join(map(str, BITS))}")
        if self.bits < 16 and (self.groups < 1 or self.head_dim % self.groups):
            raise ValueError(f"{self.groups} scale groups do not divide a head_dim of {self.head_dim}")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one vector."""
        return 2 * self.head_dim if self.bits == 16 else packed_bytes(self.head_dim, self.bits)

    @property
    def params(self) -> int:
        """Scales and zero points of one vector."""
        return 0 if self.bits == 16 else 2 * self.groups

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``rows`` [n, head_dim] -> bytes uint8 [n, code_bytes] and FP16 [n, params]."""
        if self.bits == 16:
            return self._half(rows).contiguous().view(torch.uint8), _no_params(rows)
        codes, scale, zero = affine(self._grouped(rows), 2**self.bits)
        return pack(codes.flatten(-2), self.bits), torch.cat([scale, zero], dim=-1)

    def decode(self, codes: Tensor, params: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of :meth:`encode`, [n, head_dim]."""
        if self.bits == 16:
            return codes.view(self.half).to(dtype)
        grouped = self._grouped(unpack(codes, self.bits, self.head_dim))
        scale, zero = params.chunk(2, dim=-1)
        return restore(grouped, scale, zero, dtype).flatten(-2)

    def round_trip(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """What decoding the encoded ``rows`` gives, bit for bit, without packing."""
        if self.bits == 16:
            return self._half(rows).to(dtype)
        codes, scale, zero = affine(self._grouped(rows), 2**self.bits)
        return restore(codes, scale, zero, dtype).flatten(-2)

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.groups, self.head_dim // self.groups))

    def _half(self, rows: Tensor) -> Tensor:
        if rows.numel():
            require_half_range(*(extreme.float() for extreme in torch.aminmax(rows, dim=-1)))
        return rows.to(self.half)


def _no_params(rows: Tensor) -> Tensor:
    return torch.empty(len(rows), 0, dtype=torch.float16, device=rows.device)
