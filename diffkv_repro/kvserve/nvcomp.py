"""NVIDIA nvCOMP's codecs on a GPU, under the names and format ids that frames know everywhere.

Nothing here is imported from nvCOMP before a codec is used: the names exist on every machine, so that a profile can be
read, compared and refused with a reason.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from diffkv_repro.kvserve.codecs import CODECS, Codec, CodecError, CodecUnavailable, Coded, require_levels


@dataclass(frozen=True)
class NvComp(Codec):
    """One of nvCOMP's algorithms on bytes, one byte a code (KVServe: data type u1; Bitcomp bit-wise)."""

    algorithm: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def require(self) -> None:
        self._library()

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        nvcomp = self._library()
        if not symbols.size:
            return Coded(b"", b"")
        coder = nvcomp.Codec(algorithm=self.algorithm, **self.options)
        encoded = coder.encode(nvcomp.as_array(torch.from_numpy(symbols).cuda()))
        return Coded(b"", np.asarray(encoded.cpu()).tobytes())

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        nvcomp = self._library()
        if not count:
            return np.zeros(0, dtype=np.uint8)
        coder = nvcomp.Codec(algorithm=self.algorithm, **self.options)
        try:
            plain = coder.decode(nvcomp.as_array(torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()))
            symbols = np.asarray(plain.cpu()).view(np.uint8).ravel()
        except RuntimeError as error:
            raise CodecError(f"not {self.name} code: {error}") from error
        if symbols.size != count:
            raise CodecError(f"{symbols.size} codes came out; {count} were expected")
        return require_levels(symbols.copy(), levels)

    def _library(self) -> Any:
        try:
            from nvidia import nvcomp
        except ImportError as error:
            raise CodecUnavailable(
                f"codec {self.name} needs the package nvidia-nvcomp-cu12 or -cu13, which is not installed; "
                "codecs that run on a CPU are none, bitpack, lz4, zstd, ans, range"
            ) from error
        if not torch.cuda.is_available():
            raise CodecUnavailable(f"codec {self.name} needs an NVIDIA GPU, and there is none that torch can use")
        return nvcomp


def _register(algorithm: str, format_id: int, options: dict[str, Any] | None = None) -> type[NvComp]:
    name = f"nvcomp-{algorithm.lower()}"
    members = {
        "__doc__": f"nvCOMP {algorithm}.",
        "__module__": __name__,
        "name": name,
        "format_id": format_id,
        "algorithm": algorithm,
        "options": options or {},
    }
    return CODECS.add(dataclass(frozen=True)(type(f"NvComp{algorithm}", (NvComp,), members)))


NVCOMP = tuple(
    _register(*entry)
    for entry in [
        ("ANS", 16, {"data_type": "|u1"}),
        ("Bitcomp", 17, {"data_type": "|b1", "algorithm_type": 0}),
        ("Cascaded", 18, {"data_type": "|u1"}),
        ("LZ4", 19),
        ("Zstd", 20),
        ("Deflate", 21),
        ("GDeflate", 22),
    ]
)
