"""The body of a layer in a frame, written and read in the same order by the parts of a profile.

Shapes are never in the stream: the reader knows them from the frame's header and from what it has read before, so no
length in a damaged body can make it take memory.
"""

import struct

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.core.packing import pack, packed_bytes, unpack
from diffkv_repro.kvserve.codecs import Codec, CodecError, Coded, bits_of

_LENGTH = struct.Struct("<I")


class StreamWriter:
    """Collects the streams of one layer, in :attr:`parts`; ``code_bytes`` counts coded codes without their models."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.parts: list[bytes] = []
        self.code_bytes = 0

    def codes(self, codes: Tensor, levels: int) -> None:
        """Codes uint8 of any shape, through the codec. The last dimension is that of channels.

        Codes on a GPU leave it as a codec of the GPU has made them, and not before.
        """
        if codes.is_cuda and self._codec.on_device and codes.numel():
            coded = self._codec.encode_device(codes.contiguous().view(-1), levels)
            self._add(Coded(b"", coded.cpu().numpy().tobytes()))
            return
        self._coded(
            _ordered(codes, self._codec).contiguous().view(-1).cpu().numpy(), levels, _contexts(codes, self._codec)
        )

    def numbers(self, tensor: Tensor, *, codes: bool = True) -> None:
        """Keys or values in 16 or 32 bits, through the codec; without ``codes``, numbers that only describe them."""
        size, counted = tensor.element_size(), self.code_bytes
        raw = tensor.contiguous().cpu().view(torch.uint8).view(-1).numpy()
        if self._codec.shuffle:
            self._coded(np.ascontiguousarray(raw.reshape(-1, size).T).ravel(), 256, size)
        else:
            self._coded(raw, 256, 1)
        if not codes:
            self.code_bytes = counted

    def small(self, codes: Tensor, levels: int) -> None:
        """Codes uint8 that describe the others (which step of a ladder), bit-packed and not counted as codes."""
        self.parts.append(pack(codes.contiguous().view(-1).cpu(), bits_of(levels)).numpy().tobytes())

    def meta(self, tensor: Tensor) -> None:
        """Scales, zero points, indices: as they are."""
        self.parts.append(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())

    def count(self, count: int) -> None:
        """A number that the reader could not know."""
        self.parts.append(_LENGTH.pack(count))

    def _coded(self, symbols: np.ndarray, levels: int, contexts: int) -> None:
        if not symbols.size:
            return
        self._add(self._codec.encode(symbols, levels, contexts))

    def _add(self, coded: Coded) -> None:
        self.parts += [_LENGTH.pack(len(coded.model) + len(coded.payload)), coded.model, coded.payload]
        self.code_bytes += len(coded.payload)


class StreamReader:
    """Takes the streams of one layer's body apart. Every method raises CodecError for a body that is not one."""

    def __init__(self, body: bytes | memoryview, codec: Codec, device: torch.device | str = "cpu") -> None:
        self._body = memoryview(body)
        self._codec = codec
        self._device = device
        self._at = 0

    def codes(self, shape: tuple[int, ...], levels: int) -> Tensor:
        """Codes uint8 of ``shape``."""
        ordered = (*shape[:-2], shape[-1], shape[-2]) if _channelwise(shape, self._codec) else shape
        flat = self._coded(_size(shape), levels, _contexts_of(shape, self._codec))
        codes = flat.view(ordered)
        return codes.transpose(-1, -2) if ordered is not shape else codes

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Keys or values of ``shape``, finite ones."""
        size, count = dtype.itemsize, _size(shape)
        raw = self._coded(count * size, 256, size if self._codec.shuffle else 1)
        if self._codec.shuffle:
            raw = raw.view(size, count).T.contiguous().view(-1)
        return raw.view(dtype).view(shape)

    def small(self, shape: tuple[int, ...], levels: int) -> Tensor:
        """Codes that describe the others."""
        count, bits = _size(shape), bits_of(levels)
        raw = torch.frombuffer(self._take(packed_bytes(count, bits)), dtype=torch.uint8) if count else _none()
        codes = unpack(raw, bits, count)
        if count and int(codes.max()) >= levels:
            raise CodecError(f"a step is {int(codes.max())}; allowed are 0 to {levels - 1}")
        return codes.view(shape).to(self._device)

    def meta(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scales, zero points, indices. Raises CodecError for numbers that are not finite."""
        count = _size(shape)
        raw = torch.frombuffer(self._take(count * dtype.itemsize), dtype=dtype) if count else _none().view(dtype)
        if dtype.is_floating_point and not bool(torch.isfinite(raw).all()):
            raise CodecError("a scale or zero point is not finite")
        return raw.view(shape).to(self._device)

    def count(self, most: int) -> int:
        """A number of at most ``most``."""
        (count,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if count > most:
            raise CodecError(f"a count is {count}; at most {most} are possible")
        return count

    def finish(self) -> None:
        """Raise CodecError where something is left over."""
        if self._at != len(self._body):
            raise CodecError(f"{len(self._body) - self._at} bytes of a layer are left over")

    def _coded(self, count: int, levels: int, contexts: int) -> Tensor:
        if not count:
            return _none().to(self._device)
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return torch.from_numpy(self._codec.decode(self._take(length), count, levels, contexts)).to(self._device)

    def _take(self, length: int) -> bytearray:
        if length > len(self._body) - self._at:
            raise CodecError(f"{length} bytes are needed and {len(self._body) - self._at} left")
        self._at += length
        return bytearray(self._body[self._at - length : self._at])


def _channelwise(shape: tuple[int, ...], codec: Codec) -> bool:
    return codec.channelwise and len(shape) > 1


def _contexts_of(shape: tuple[int, ...], codec: Codec) -> int:
    """One context, or one for each channel of each head of codes [..., tokens, channels]."""
    return _size((*shape[:-2], shape[-1])) if _channelwise(shape, codec) else 1


def _contexts(codes: Tensor, codec: Codec) -> int:
    return _contexts_of(tuple(codes.shape), codec)


def _ordered(codes: Tensor, codec: Codec) -> Tensor:
    return codes.transpose(-1, -2) if _channelwise(tuple(codes.shape), codec) else codes


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
