"""NVIDIA nvCOMP's codecs on a GPU, under the names and format ids that frames know everywhere.

Nothing here is imported from nvCOMP before a codec is used: the names exist on every machine, so that a profile can be
read, compared and refused with a reason.

nvCOMP is native code that reads what a peer sent. Its Cascaded, Bitcomp, Zstd and Deflate decoders accept valid input
only (its release notes say so), and its binding has been seen to end the process at another chunk size than its own.
So the chunk size is fixed, sizes are compared before anything is decoded, and :meth:`NvComp.require` tries a codec in a
process of its own before this one relies on it. Frames with these codecs belong between machines that trust each other.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.kvserve.codecs import CODECS, Codec, CodecError, CodecUnavailable, Coded, require_levels

CHUNK = 1 << 16  # bytes that nvCOMP codes independently: its own default
_TRIAL = 70_001  # symbols: more than a chunk, and an odd number
_TRIAL_SECONDS = 120
_OWN_MEMORY = "DIFFKV_REPRO_NVCOMP_OWN_MEMORY"  # set: a binding that crashes on torch's memory is not handed any
_ALIGNED = 16  # bytes: what nvCOMP asks of any buffer at most


@dataclass(frozen=True)
class NvComp(Codec):
    """One of nvCOMP's algorithms on bytes, one byte a code (KVServe: data type u1)."""

    algorithm: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    on_device: ClassVar[bool] = True

    def require(self) -> None:
        self._library()
        why = _trial(self.name)
        if why:
            raise CodecUnavailable(f"codec {self.name} does not work here: {why}")

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        self._library()
        coded = self.encode_device(torch.from_numpy(symbols).cuda(), levels)
        return Coded(b"", coded.cpu().numpy().tobytes())

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        self._library()
        if not count:
            return np.zeros(0, dtype=np.uint8)
        if not len(data):
            raise CodecError(f"0 bytes are not {self.name} code of {count} symbols")
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        return require_levels(self.decode_device(coded, count, levels).cpu().numpy(), levels)

    def encode_device(self, symbols: Tensor, levels: int) -> Tensor:
        """Code uint8 [n] of ``symbols`` uint8 on a GPU, in order with the current stream; nothing leaves the GPU.

        Waits for the GPU, for only it knows the size. Raises CodecError where nvCOMP fails.
        """
        coder = self._coder(symbols)
        if not symbols.numel():
            return symbols.new_empty(0)
        with _named(f"{self.name} cannot code {symbols.numel()} symbols"):
            return coder.encode(_flat(symbols))

    def decode_device(self, coded: Tensor, count: int, levels: int) -> Tensor:
        """The ``count`` symbols uint8 [count] of ``coded`` uint8 on a GPU; they are not compared with ``levels``.

        Raises CodecError for code of another size, before it is decoded, and for what is none.
        """
        coder = self._coder(coded)
        if not count:
            return coded.new_empty(0)
        with _named(f"not {self.name} code"):
            return coder.decode(_flat(coded), count)

    def _coder(self, tensor: Tensor) -> "_Coder":
        """This thread's, on the tensor's device."""
        if tensor.dtype != torch.uint8 or not tensor.is_cuda:
            raise ValueError(f"a tensor is {tensor.dtype} on {tensor.device}; {self.name} takes torch.uint8 on cuda")
        nvcomp, device = self._library(), tensor.device
        own = _coders.__dict__.setdefault("found", {})
        if (self.name, device.index) not in own:
            own[self.name, device.index] = _Coder(nvcomp, device, self.algorithm, self.options)
        return own[self.name, device.index]

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


_coders = threading.local()  # nvCOMP: a codec belongs to one thread, with its scratch memory


class _Coder:
    """One codec of nvCOMP on a stream of its own, which waits for torch's current stream and is waited for by it.

    Torch's default stream is stream 0, which nvCOMP may take for "none given"; a stream of its own is never that.
    """

    def __init__(self, nvcomp: Any, device: torch.device, algorithm: str, options: dict[str, Any]) -> None:
        self._nvcomp, self._device = nvcomp, device
        self._stream = torch.cuda.Stream(device)
        with _named(f"nvCOMP makes no codec {algorithm}", CodecUnavailable), torch.cuda.device(device):
            self._codec = nvcomp.Codec(
                algorithm=algorithm,
                device_id=device.index,
                cuda_stream=self._stream.cuda_stream,
                uncomp_chunk_size=CHUNK,
                bitstream_kind=nvcomp.BitstreamKind.NVCOMP_NATIVE,
                **options,
            )
        # Into torch's memory where the binding can (from nvCOMP 5.3 on), else out of nvCOMP's own.
        ways: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = [
            (self._encode_into, self._decode_into),
            (self._encode_out_of, self._decode_out_of),
        ]
        if os.environ.get(_OWN_MEMORY):
            del ways[0]
        failures = []
        for self.encode, self.decode in ways:
            try:
                self._try_out()
                return
            except Exception as error:  # a binding's own kinds
                failures.append(f"{type(error).__name__}: {error}")
        raise CodecUnavailable(f"nvCOMP's {algorithm} gives nothing back: {'; '.join(failures)}")

    def _try_out(self) -> None:
        symbols = (torch.arange(_TRIAL, device=self._device) * 7919 % 13).to(torch.uint8)
        coded = self.encode(symbols)
        if not torch.equal(self.decode(coded, _TRIAL), symbols):
            raise RuntimeError("other symbols came back")
        if coded.numel() >= _TRIAL:  # of 13 levels and in a simple order: the size is that of a buffer and not of code
            raise RuntimeError(f"{_TRIAL} symbols of 13 levels take {coded.numel()} bytes")

    def _encode_into(self, symbols: Tensor) -> Tensor:
        with self._ordered():
            source = self._array(symbols)
            out = symbols.new_empty(self._codec.get_max_comp_buffer_size(source))
            # An array of nvCOMP's around the tensor: given the tensor itself, encode returns that, and no size.
            size = int(self._codec.encode(source, out=self._array(out)).buffer_size)
        return out[:size].clone()  # what is left of the bound is given back

    def _decode_into(self, coded: Tensor, count: int) -> Tensor:
        out = coded.new_empty(count)
        with self._ordered():
            source = self._array(coded)
            _require_count(int(self._codec.get_uncomp_buffer_size(source)), count)
            found = self._codec.decode(source, data_type="|u1", out=self._array(out))
            _require_count(int(found.buffer_size), count)
        return out

    def _encode_out_of(self, symbols: Tensor) -> Tensor:
        with self._ordered():
            found = self._codec.encode(self._array(symbols))
        return self._taken(found)

    def _decode_out_of(self, coded: Tensor, count: int) -> Tensor:
        with self._ordered():
            found = self._codec.decode(self._array(coded), data_type="|u1")
        _require_count(int(found.buffer_size), count)
        return self._taken(found)

    def _taken(self, found: Any) -> Tensor:
        """A copy of an array of nvCOMP's own, which frees its memory without asking torch's streams."""
        whole = torch.from_dlpack(found).view(torch.uint8).flatten()  # as long as the buffer, not as what is in it
        taken = whole[: int(found.buffer_size)].clone()
        torch.cuda.current_stream(self._device).synchronize()
        return taken

    def _array(self, tensor: Tensor) -> Any:
        """nvCOMP's view of a tensor, on the codec's stream."""
        return self._nvcomp.as_array(tensor, cuda_stream=self._stream.cuda_stream)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """What torch's current stream was given comes before the block, and what it is given later after it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device):
                yield
        finally:
            current.wait_stream(self._stream)


def _flat(tensor: Tensor) -> Tensor:
    """One dimension without gaps, where nvCOMP may read it."""
    flat = tensor.contiguous().view(-1)
    return flat.clone() if flat.data_ptr() % _ALIGNED else flat


def _require_count(found: int, count: int) -> None:
    if found != count:
        raise CodecError(f"{found} codes came out; {count} were expected")


@contextmanager
def _named(what: str, kind: type[Exception] = CodecError) -> Iterator[None]:
    """Whatever the binding raises, as ``kind``."""
    try:
        yield
    except (CodecError, CodecUnavailable):
        raise
    except Exception as error:  # RuntimeError, ValueError, TypeError: it differs by version
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


@cache
def _trial(name: str) -> str:
    """Why a codec does not work in a process of its own; empty where it does. A crash there leaves this one alone."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import numpy, torch\n"
        "from diffkv_repro.kvserve import nvcomp\n"
        f"codec = nvcomp.CODECS.make({name!r})\n"
        f"symbols = torch.randint(0, 12, ({_TRIAL},), dtype=torch.uint8, device='cuda')\n"
        f"assert torch.equal(codec.decode_device(codec.encode_device(symbols, 12), {_TRIAL}, 12), symbols)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a trial took more than {_TRIAL_SECONDS} seconds"
    if done.returncode < 0:
        return f"a trial was ended by signal {-done.returncode}"
    return "".join(done.stderr.strip().splitlines()[-1:]) or "a trial failed" if done.returncode else ""


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
        # KVServe hands Bitcomp bits (|b1), which nvCOMP 6 does not list among its types; the codes are bytes.
        ("Bitcomp", 17, {"data_type": "|u1", "algorithm_type": 0}),
        ("Cascaded", 18, {"data_type": "|u1"}),
        ("LZ4", 19),
        ("Zstd", 20),
        ("Deflate", 21),
        ("GDeflate", 22),
    ]
)
