"""DEFLATE, one of the codecs that KVServe takes from nvCOMP, by zlib: slow on a CPU, and there to compare with."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from diffkv_repro.kvserve.codecs import CODECS, Codec, CodecError, Coded, require_levels
from diffkv_repro.kvserve.registry import require_whole


@CODECS.add
@dataclass(frozen=True)
class Deflate(Codec):
    """DEFLATE at ``level``, without zlib's header and checksum; a symbol is one byte to its Huffman stage."""

    level: int = 6
    name: ClassVar[str] = "deflate"
    format_id: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("level", self.level, 1, 9)

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        if not symbols.size:
            return Coded(b"", b"")
        coder = zlib.compressobj(self.level, wbits=-15)
        return Coded(b"", coder.compress(symbols.tobytes()) + coder.flush())

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        if not count and not data:
            return np.zeros(0, dtype=np.uint8)
        inflate = zlib.decompressobj(wbits=-15)
        try:
            plain = inflate.decompress(bytes(data), max(1, count))  # count bounds what damage can take
            rest = inflate.decompress(inflate.unconsumed_tail, 1)  # a stream may end after its last symbol
        except zlib.error as error:
            raise CodecError(f"not a DEFLATE stream: {error}") from error
        if rest or len(plain) != count or not count or inflate.unused_data or not inflate.eof:
            raise CodecError(f"a DEFLATE stream does not hold {count} bytes")
        return require_levels(np.frombuffer(bytearray(plain), dtype=np.uint8), levels)
