"""``Frame``: a request's KV cache on the wire. A header, then one section a layer, each with a checksum of its own.

    header   magic KVSF, version, length | layers, KV heads, head_dim, dtype, first position, tokens | fingerprint of
             the model, digest of shared state | format ids | parameters, metadata (JSON) | CRC-32
    section  layer, CRC-32, bytes of the body, bytes of codes in it | body

All integers are little-endian. A section's checksum starts from the header's, so that a section of another frame does
not fit. A checksum guards against accidents and not against malice, so whatever is read is bounded as well: nothing in
a frame can make its reader take more memory than the cache that the header declares, and that has to be expected.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.codecs import CodecError
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.in_turn import in_turn, times, write_in_turn
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV, require_shape
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter
from diffkv_repro.kvserve.transforms import power_of

LIMIT = 1 << 34  # bytes of raw KV that a reader expects at most, unless told otherwise: 16 GiB
_SECTION = struct.Struct("<IIQQ")
# Bytes of body per number: the dearest quantizer stores a scale and a zero point with each code.
_DEAREST = 16
_SLACK = 1 << 16


@dataclass(frozen=True)
class Frame:
    """A header and its sections, as bytes that were checked. ``assets`` are what decoding will use."""

    header: Header
    sections: tuple[bytes, ...]
    assets: Assets = field(default_factory=Assets, repr=False)

    @classmethod
    def of(cls, profile: Profile, kv: KV, layout: KVLayout, assets: Assets, metadata: Mapping[str, Any]) -> Self:
        """Encode; see :meth:`Profile.encode`."""
        if len(kv.layers) != layout.layers:
            raise ValueError(f"kv has {len(kv.layers)} layers, the layout {layout.layers}")
        header = Header(profile, layout, kv.start, kv.tokens, profile.state(assets), metadata)
        return cls(header, tuple(_sections(header, kv.layers, assets)), assets)

    @classmethod
    def from_bytes(
        cls, data: bytes | memoryview, layout: KVLayout, *, assets: Assets | None = None, limit: int = LIMIT
    ) -> Self:
        """The frame in ``data``, for a model of ``layout``; checksums are verified, nothing is decoded.

        Raises FrameError for anything but a whole, undamaged frame of this model, of at most ``limit`` bytes of raw KV.
        """
        view, at = memoryview(data).cast("B"), 0

        def take(count: int) -> memoryview:
            nonlocal at
            if count > len(view) - at:
                raise FrameError(f"truncated: {count} bytes are needed at byte {at}, and {len(view) - at} are left")
            at += count
            return view[at - count : at]

        frame = cls.read(take, layout, assets=assets, limit=limit)
        if at != len(view):
            raise FrameError(f"{len(view) - at} bytes follow the frame")
        return frame

    @classmethod
    def read(
        cls, read: Callable[[int], Any], layout: KVLayout, *, assets: Assets | None = None, limit: int = LIMIT
    ) -> Self:
        """The same from ``read``, which gives exactly so many bytes (a file's, a socket's)."""
        header = Header.read(read, layout, limit)
        sections = tuple(_section(read, header, layer) for layer in range(layout.layers))
        return cls(header, sections, assets or Assets())

    def to_bytes(self) -> bytes:
        """What goes over the wire."""
        return b"".join([self.header.packed, *self.sections])

    @cached_property
    def nbytes(self) -> int:
        """Everything: the length of :meth:`to_bytes`."""
        return len(self.header.packed) + sum(map(len, self.sections))

    @cached_property
    def code_bytes(self) -> int:
        """Codes alone, as the codec left them: no scales, no statistics of the codec, no lengths, no header."""
        return sum(map(code_bytes, self.sections))

    @property
    def ratio(self) -> float:
        """16-bit KV over everything in the frame: the true compression ratio."""
        return self.header.layout.half_bytes(self.header.tokens) / self.nbytes

    @property
    def code_ratio(self) -> float:
        """16-bit KV over the codes alone."""
        return self.header.layout.half_bytes(self.header.tokens) / max(1, self.code_bytes)

    def decode(self, assets: Assets | None = None) -> KV:
        """Keys and values in the model's dtype. Raises FrameError for a body that is none, or other ``assets``."""
        return KV(tuple(self.layers(assets)), self.header.start)

    def layers(self, assets: Assets | None = None) -> Iterator[LayerKV]:
        """Layer by layer, each decoded when it is asked for."""
        used = assets or self.assets
        self.header.require_state(used)
        for layer, section in enumerate(self.sections):
            yield decode_layer(self.header, layer, section, used)


def stream(
    profile: Profile, layers: Iterable[LayerKV], layout: KVLayout, tokens: int, start: int, assets: Assets,
    metadata: Mapping[str, Any],
) -> Iterator[bytes]:  # fmt: skip
    """Pieces of a frame; see :meth:`Profile.stream`."""
    header = Header(profile, layout, start, tokens, profile.state(assets), metadata)
    yield header.packed
    yield from _sections(header, layers, assets)


def receive(
    read: Callable[[int], Any], layout: KVLayout, *, assets: Assets | None = None, limit: int = LIMIT,
    check: Callable[[Header], None] | None = None,
) -> Iterator[LayerKV]:  # fmt: skip
    """Decode each layer of a frame as soon as its section is in. Raises FrameError as :meth:`Frame.read` does.

    ``check`` may refuse a header, with a FrameError, before anything is decoded.
    """
    header, used = Header.read(read, layout, limit), assets or Assets()
    header.require_state(used)
    if check is not None:
        check(header)
    for layer in range(layout.layers):
        yield decode_layer(header, layer, _section(read, header, layer), used)


def encode_layer(header: Header, index: int, layer: LayerKV, assets: Assets) -> bytes:
    """The section of one layer, for whoever gets layers one at a time; :meth:`Profile.stream` is for the rest."""
    profile, layout = header.profile, header.layout
    require_shape(layer, layout, header.tokens)
    place = Place(layout, index, header.tokens, header.start, assets=assets)
    streams = StreamWriter(profile.codec)
    _write_layer(profile, layer, place, streams)
    return section_of(header, index, streams)


def decode_layer(header: Header, index: int, section: bytes, assets: Assets) -> LayerKV:
    """One layer of a section that was checked. Raises FrameError for a body that is none."""
    place = Place(header.layout, index, header.tokens, header.start, assets=assets)
    streams = StreamReader(body_of(section), header.profile.codec)
    try:
        found = _read_layer(header.profile, place, streams)
        streams.finish()
    except CodecError as error:
        raise FrameError(f"layer {index} is damaged: {error}") from error
    return found


def code_bytes(section: bytes) -> int:
    """Bytes of codes in a section."""
    return _SECTION.unpack_from(section)[3]


def frame_length(
    read: Callable[[int], Any], seek: Callable[[int, int], Any], layout: KVLayout, *, limit: int = LIMIT
) -> tuple[Header, int]:
    """Header and length of the frame in a file, from the heads of its sections alone; their bodies are skipped.

    Raises FrameError for a header that is none of ``layout``.
    """
    header = Header.read(read, layout, limit)
    total = len(header.packed)
    for layer in range(layout.layers):
        index, _, length, _ = _SECTION.unpack(bytes(read(_SECTION.size)))
        if index != layer:
            raise FrameError(f"section {layer} says layer {index}")
        seek(length, 1)
        total += _SECTION.size + length
    return header, total


def _sections(header: Header, layers: Iterable[LayerKV], assets: Assets) -> Iterator[bytes]:
    layout = header.layout
    header.profile.codec.require()
    count = 0
    for count, layer in enumerate(layers, start=1):
        if count > layout.layers:
            raise ValueError(f"more layers came than the layout's {layout.layers}")
        yield encode_layer(header, count - 1, layer, assets)
    if count != layout.layers:
        raise ValueError(f"{count} layers came; the layout has {layout.layers}")


def section_of(header: Header, layer: int, streams: StreamWriter) -> bytes:
    """The section of a layer whose body is in ``streams``."""
    length = sum(map(len, streams.parts))
    crc = _crc(header, layer, streams.code_bytes, length, streams.parts)
    return b"".join([_SECTION.pack(layer, crc, length, streams.code_bytes), *streams.parts])


def body_of(section: bytes) -> memoryview:
    """What :func:`section_of` put into a section."""
    return memoryview(section)[_SECTION.size :]


def _write_layer(profile: Profile, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
    if profile.quantizer.exact and not profile.transforms:
        profile.quantizer.encode(layer, place, streams)
        return
    if in_turn(profile):
        write_in_turn(profile, layer, place, streams)
        return
    for transform in profile.transforms:
        layer = transform.forward(layer, place, streams)
    # Quantizers count in FP16. What is larger (float32, bfloat16, a rotated outlier) comes down by a power of two.
    powers = [power_of(tensor) for tensor in (layer.key, layer.value)]
    streams.meta(torch.tensor(powers, dtype=torch.uint8))
    profile.quantizer.encode(LayerKV(*_scaled(layer, [-power for power in powers])), place, streams)


def _read_layer(profile: Profile, place: Place, streams: StreamReader) -> LayerKV:
    if profile.quantizer.exact and not profile.transforms:
        return profile.quantizer.decode(place, streams)
    sides = [transform.read(place, streams) for transform in profile.transforms]
    powers = streams.meta((2,), torch.uint8).tolist()
    if not profile.transforms and not any(powers):
        place = replace(place, dtype=place.layout.dtype)
    found = profile.quantizer.decode(place, streams)
    layer = LayerKV(*_scaled(LayerKV(found.key.to(place.dtype), found.value.to(place.dtype)), powers), found.kept)
    for transform, side in zip(reversed(profile.transforms), reversed(sides), strict=True):
        layer = transform.inverse(layer, place, side)
    key, value = (_stored(tensor, place.layout.dtype) for tensor in (layer.key, layer.value))
    if layer.kept is not None:
        key, value = (tensor.masked_fill(~layer.kept[..., None], 0) for tensor in (key, value))
    return replace(layer, key=key, value=value)


def _scaled(layer: LayerKV, powers: list[int]) -> list[Tensor]:
    return [times(tensor, power) for tensor, power in zip((layer.key, layer.value), powers, strict=True)]


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In ``dtype``, where the top of a grid may lie half a step beyond the largest number."""
    stored = tensor.to(dtype)
    if not _finite(stored) and dtype != torch.float32:
        most = torch.finfo(dtype).max
        stored = tensor.clamp(-most, most).to(dtype)
    if not _finite(stored):
        raise CodecError("it holds numbers that are not finite")
    return stored


def _finite(tensor: Tensor) -> bool:
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))  # a NaN among them makes both NaN


def _section(read: Callable[[int], Any], header: Header, layer: int) -> bytes:
    """The next section with its own header, verified."""
    head = bytes(read(_SECTION.size))
    index, crc, length, codes = _SECTION.unpack(head)
    most = (
        _DEAREST * header.layout.raw_bytes(header.tokens) // header.layout.layers // header.layout.dtype.itemsize
        + _SLACK
    )
    if index != layer or length > most or codes > length:
        raise FrameError(f"section {layer} says layer {index}, {length} bytes with {codes} of codes; most are {most}")
    body = bytes(read(length))
    if _crc(header, index, codes, length, [body]) != crc:
        raise FrameError(f"layer {layer} is damaged: its checksum does not match")
    return head + body


def _crc(header: Header, layer: int, codes: int, length: int, parts: Iterable[bytes]) -> int:
    crc = zlib.crc32(struct.pack("<IQQ", layer, length, codes), header.checksum)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
