"""Integer codes <-> bytes, any width from 1 to 8 bits, with no gap between codes."""

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take: less than one byte is left over."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """``codes`` [..., n], each below 2**bits, as bytes uint8 [..., ceil(n * bits / 8)], first code in the low bits.

    Codes are packed along the last dimension; flatten first to have no gap between rows either.
    """
    _check(bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}; it must be torch.uint8")
    if bits == 8:
        return codes
    per_unit, unit = _unit(bits)
    missing = -codes.shape[-1] % per_unit
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    lanes = codes.unflatten(-1, (-1, per_unit))
    if unit == 1:
        word = lanes[..., 0].clone()
        for index in range(1, per_unit):
            word |= lanes[..., index] << (index * bits)
        packed = word
    else:
        # Eight codes of 3, 5, 6 or 7 bits fill so many bytes exactly.
        wide = torch.zeros(lanes.shape[:-1], dtype=torch.int64, device=codes.device)
        for index in range(per_unit):
            wide |= lanes[..., index].long() << (index * bits)
        packed = torch.stack([(wide >> (8 * byte)) & 0xFF for byte in range(unit)], dim=-1).to(torch.uint8).flatten(-2)
    return packed[..., : packed_bytes(codes.shape[-1] - missing, bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The ``count`` codes uint8 [..., count] that :func:`pack` put into ``packed``."""
    _check(bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ValueError(f"{packed.shape[-1]} bytes do not hold {count} codes of {bits} bits")
    if bits == 8:
        return packed
    per_unit, unit = _unit(bits)
    mask = (1 << bits) - 1
    if unit == 1:
        lanes = torch.stack([(packed >> (index * bits)) & mask for index in range(per_unit)], dim=-1)
    else:
        missing = -packed.shape[-1] % unit
        words = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, unit)).long()
        wide = torch.zeros(words.shape[:-1], dtype=torch.int64, device=packed.device)
        for byte in range(unit):
            wide |= words[..., byte] << (8 * byte)
        lanes = torch.stack([(wide >> (index * bits)) & mask for index in range(per_unit)], dim=-1).to(torch.uint8)
    return lanes.flatten(-2)[..., :count]


def _unit(bits: int) -> tuple[int, int]:
    """The smallest run of codes that fills whole bytes, and how many."""
    return (8 // bits, 1) if 8 % bits == 0 else (8, bits)


def _check(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; allowed are 1 to 8")
