"""Lossless codecs: the last stage of a profile, on the codes of one stream at a time (C in KVServe's C(Q(T(X)))).

A stream is so many symbols below ``levels``, one byte each, perhaps as ``contexts`` runs of equal length whose
statistics differ (the channels of a tensor, the high and the low bytes of numbers). Whoever decodes knows count,
levels and contexts beforehand, so a stream can claim nothing about its own size.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import lz4.block
import numpy as np
import torch
import zstandard
from torch import Tensor

from diffkv_repro.core.packing import pack, packed_bytes, unpack
from diffkv_repro.kvserve.registry import Part, Registry, require_flag, require_whole


class CodecError(ValueError):
    """Bytes that the codec cannot have written."""


class CodecUnavailable(RuntimeError):
    """The codec needs a package or a device that is not here; the text says which."""


class Coded(NamedTuple):
    """A stream in bytes: what describes its ``model`` (statistics), and the codes themselves."""

    model: bytes
    payload: bytes


@dataclass(frozen=True)
class Codec(Part):
    """``shuffle`` puts the low bytes of 16- and 32-bit numbers together, and the high ones: their statistics differ.

    Codes of a quantizer are single bytes and are never shuffled.
    """

    shuffle: bool = False

    channelwise: ClassVar[bool] = False  # whether channels are contexts of their own
    on_device: ClassVar[bool] = False  # whether it codes on a GPU

    def __post_init__(self) -> None:
        require_flag("shuffle", self.shuffle)

    def require(self) -> None:
        """Raise CodecUnavailable where this machine cannot run the codec."""
        return

    @abstractmethod
    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        """``symbols`` uint8 [n], each below ``levels`` (2 to 256), in ``contexts`` runs of n / contexts."""

    @abstractmethod
    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        """The ``count`` symbols uint8 of model and payload together. Raises CodecError for what is not their code."""

    def encode_device(self, symbols: Tensor, levels: int) -> Tensor:
        """Model and payload uint8 [n] of ``symbols`` uint8, on its device; a codec of the CPU goes there and back."""
        return _tensor(b"".join(self.encode(symbols.flatten().cpu().numpy(), levels)), symbols.device)

    def decode_device(self, coded: Tensor, count: int, levels: int) -> Tensor:
        """The ``count`` symbols uint8 [count] of :meth:`encode_device`'s code, on its device. Raises CodecError."""
        return torch.from_numpy(self.decode(coded.cpu().numpy().tobytes(), count, levels)).to(coded.device)


CODECS = Registry("codec")
PIECE = 1 << 18  # symbols that are packed or coded at a time where working copies are wider than they are


def bits_of(levels: int) -> int:
    """Bits of a code below ``levels``."""
    return max(1, (levels - 1).bit_length())


def pack_symbols(symbols: np.ndarray, levels: int) -> bytes:
    """Symbols uint8 [n] without gaps, in the fewest whole bits that ``levels`` need."""
    bits = bits_of(levels)
    if bits == 8:
        return symbols.tobytes()
    # Piece by piece: packing spreads codes over words. Whole bytes, for a piece is a multiple of eight codes.
    pieces = (symbols[start : start + PIECE] for start in range(0, len(symbols), PIECE))
    return b"".join(pack(torch.from_numpy(piece), bits).numpy().tobytes() for piece in pieces)


def unpack_symbols(data: bytes, count: int, levels: int) -> np.ndarray:
    """The inverse of :func:`pack_symbols`. Raises CodecError for another length and symbols that are too large."""
    bits = bits_of(levels)
    if len(data) != packed_bytes(count, bits):
        raise CodecError(f"{len(data)} bytes do not hold {count} codes of {bits} bits")
    if not count:
        return np.zeros(0, dtype=np.uint8)
    whole, symbols = np.frombuffer(data, dtype=np.uint8), np.empty(count, dtype=np.uint8)
    for start in range(0, count, PIECE):
        many = min(PIECE, count - start)
        piece = torch.from_numpy(whole[start * bits // 8 :][: packed_bytes(many, bits)].copy())
        symbols[start : start + many] = unpack(piece, bits, many).numpy()
    return require_levels(symbols, levels)


def _tensor(data: bytes, device: torch.device) -> Tensor:
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    return whole.to(device)


def require_levels(symbols: np.ndarray, levels: int) -> np.ndarray:
    """``symbols``. Raises CodecError where one is not below ``levels``."""
    if levels < 256 and symbols.size and int(symbols.max()) >= levels:
        raise CodecError(f"a code is {int(symbols.max())}; allowed are 0 to {levels - 1}")
    return symbols


@CODECS.add
@dataclass(frozen=True)
class NoCodec(Codec):
    """One byte a code, as KVServe's quantizers leave them."""

    name: ClassVar[str] = "none"
    format_id: ClassVar[int] = 1

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        return Coded(b"", symbols.tobytes())

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        if len(data) != count:
            raise CodecError(f"{len(data)} bytes do not hold {count} codes of one byte")
        return require_levels(np.frombuffer(bytearray(data), dtype=np.uint8), levels)


@CODECS.add
@dataclass(frozen=True)
class BitPack(Codec):
    """The fewest whole bits that the levels need: 4 for 12 levels (an entropy coder needs 3.58)."""

    name: ClassVar[str] = "bitpack"
    format_id: ClassVar[int] = 2

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        return Coded(b"", pack_symbols(symbols, levels))

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        return unpack_symbols(data, count, levels)


@CODECS.add
@dataclass(frozen=True)
class Lz4(Codec):
    """LZ4 blocks, whose length field is left out: it is known. Codes are packed first with ``packed``."""

    packed: bool = True
    name: ClassVar[str] = "lz4"
    format_id: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag("packed", self.packed)

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        plain = pack_symbols(symbols, levels) if self.packed else symbols.tobytes()
        return Coded(b"", lz4.block.compress(plain, store_size=False) if plain else b"")

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        size = packed_bytes(count, bits_of(levels)) if self.packed else count
        try:
            plain = lz4.block.decompress(bytes(data), uncompressed_size=size) if size else b""
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"not an LZ4 block of {size} bytes: {error}") from error
        return _of_plain(plain, size, count, levels, self.packed)


@CODECS.add
@dataclass(frozen=True)
class Zstd(Codec):
    """Zstandard at ``level``. Codes are better left one byte each: its Huffman stage then sees whole symbols."""

    level: int = 1
    packed: bool = False
    name: ClassVar[str] = "zstd"
    format_id: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("level", self.level, 1, 19)
        require_flag("packed", self.packed)

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        plain = pack_symbols(symbols, levels) if self.packed else symbols.tobytes()
        return Coded(b"", zstandard.ZstdCompressor(level=self.level).compress(plain) if plain else b"")

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        size = packed_bytes(count, bits_of(levels)) if self.packed else count
        try:
            # The library believes the size that the data claim before any limit of ours.
            if size and zstandard.get_frame_parameters(data).content_size != size:
                raise CodecError(f"a Zstandard frame does not hold {size} bytes")
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            plain = decompressor.decompress(data, max_output_size=size, allow_extra_data=False) if size else b""
        except zstandard.ZstdError as error:
            raise CodecError(f"not a Zstandard frame: {error}") from error
        return _of_plain(plain, size, count, levels, self.packed)


def _of_plain(plain: bytes, size: int, count: int, levels: int, packed: bool) -> np.ndarray:
    if len(plain) != size:
        raise CodecError(f"{len(plain)} bytes came out; {size} were expected")
    if packed:
        return unpack_symbols(plain, count, levels)
    return require_levels(np.frombuffer(bytearray(plain), dtype=np.uint8), levels)
