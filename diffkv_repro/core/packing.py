"""Integer codes <-> bytes, any width from 1 to 8 bits, with no gap between codes."""

import torch
from torch import Tensor

# Codes of 2 and 4 bits that share a byte are spread over a word of so many bytes; all others over eight.
_WORDS = {2: (torch.int32, 4), 4: (torch.int16, 2)}


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
    if not codes.numel():
        return codes.new_empty(*codes.shape[:-1], packed_bytes(codes.shape[-1], bits))
    words, per_word = _WORDS.get(bits, (torch.int64, 8))
    count = codes.shape[-1]
    missing = -count % per_word
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    word = _aligned(codes).view(words)
    # Pairs of neighbours move together, then pairs of pairs: all codes of a word at a time.
    lane, width = 8, bits
    while lane < 8 * per_word:
        low = _mask(width, 2 * lane, 8 * per_word)
        word = (word & low) | (word >> (lane - width) & (low << width))
        lane, width = 2 * lane, 2 * width
    if width == 8:
        return word.to(torch.uint8)[..., : packed_bytes(count, bits)]
    # Eight codes of 1, 3, 5, 6 or 7 bits fill so many bytes exactly.
    return word.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)[..., : packed_bytes(count, bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The ``count`` codes uint8 [..., count] that :func:`pack` put into ``packed``."""
    _check(bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ValueError(f"{packed.shape[-1]} bytes do not hold {count} codes of {bits} bits")
    if bits == 8:
        return packed
    if not packed.numel():
        return packed.new_empty(*packed.shape[:-1], count)
    words, per_word = _WORDS.get(bits, (torch.int64, 8))
    lane, width = 8 * per_word, bits * per_word
    if width == 8:
        word = packed.to(words)
    else:
        missing = -packed.shape[-1] % bits
        groups = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, bits))
        word = torch.nn.functional.pad(groups, (0, 8 - bits)).flatten(-2).view(words)
    while lane > 8:
        lane, width = lane // 2, width // 2
        low = _mask(width, 2 * lane, 8 * per_word)
        word = (word & low) | (word << (lane - width) & (low << lane))
    return word.view(torch.uint8)[..., :count]


def _aligned(codes: Tensor) -> Tensor:
    """``codes`` where a view as words is possible."""
    whole = codes.contiguous()
    return whole.clone() if whole.storage_offset() % 8 else whole


def _mask(width: int, lane: int, bits: int) -> int:
    """The low ``width`` bits of every ``lane`` bits of a word of ``bits``."""
    return sum(((1 << width) - 1) << start for start in range(0, bits, lane))


def _check(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; allowed are 1 to 8")
