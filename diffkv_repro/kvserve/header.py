"""The header of a frame: what it holds, for which model, made how."""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.codecs import CODECS
from diffkv_repro.kvserve.layout import DTYPE_IDS, KVLayout
from diffkv_repro.kvserve.profile import MOST_TRANSFORMS, Profile
from diffkv_repro.kvserve.quantizers import QUANTIZERS
from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.kvserve.transforms import TRANSFORMS

MAGIC = b"KVSF"
VERSION = 1
_LEAD = struct.Struct("<4sHI")  # magic, version, bytes of the whole header
# layers, KV heads, head_dim, dtype, start, tokens, fingerprint, state, transforms, quantizer, codec, and bytes of JSON
_BODY = struct.Struct("<IIIBQQ16s16sBBBII")
_CRC = struct.Struct("<I")
_MOST_JSON = 1 << 16
_MOST_HEADER = _LEAD.size + _BODY.size + MOST_TRANSFORMS + 2 * _MOST_JSON + _CRC.size
_POSITIONS = 1 << 31


class FrameError(ValueError):
    """Bytes that are no frame, a damaged one, one of another model, or one that is larger than allowed."""


@dataclass(frozen=True)
class Header:
    """``start`` and ``tokens`` say which positions; ``state`` is the digest of what transforms share.

    ``metadata`` is plain data of the sender's, up to 64 KiB of JSON.
    """

    profile: Profile
    layout: KVLayout
    start: int
    tokens: int
    state: bytes = bytes(16)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require_whole("start", self.start, 0, _POSITIONS - 1)
        require_whole("tokens", self.tokens, 1, _POSITIONS - self.start)
        if not isinstance(self.metadata, Mapping):
            raise ValueError(f"metadata is {self.metadata!r}; a mapping is needed")
        if len(_json(dict(self.metadata))) > _MOST_JSON:
            raise ValueError(f"metadata take {len(_json(dict(self.metadata)))} bytes; at most {_MOST_JSON} are allowed")

    @cached_property
    def packed(self) -> bytes:
        """The header's bytes."""
        profile, layout = self.profile, self.layout
        parts = [*profile.transforms, profile.quantizer, profile.codec]
        params, metadata = _json([part.params() for part in parts]), _json(dict(self.metadata))
        body = _BODY.pack(
            layout.layers, layout.kv_heads, layout.head_dim, DTYPE_IDS[layout.dtype], self.start, self.tokens,
            layout.fingerprint, self.state, len(profile.transforms), profile.quantizer.format_id,
            profile.codec.format_id, len(params), len(metadata),
        )  # fmt: skip
        body += bytes(part.format_id for part in profile.transforms) + params + metadata
        lead = _LEAD.pack(MAGIC, VERSION, _LEAD.size + len(body) + _CRC.size)
        return lead + body + _CRC.pack(zlib.crc32(lead + body))

    @property
    def checksum(self) -> int:
        """CRC-32 of the header."""
        return _CRC.unpack(self.packed[-_CRC.size :])[0]

    @classmethod
    def read(cls, read: Callable[[int], Any], layout: KVLayout, limit: int) -> Self:
        """The header that ``read`` gives. Raises FrameError unless it is one of ``layout`` within ``limit`` bytes."""
        lead = bytes(read(_LEAD.size))
        magic, version, size = _LEAD.unpack(lead)
        if magic != MAGIC:
            raise FrameError(f"no frame: it begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise FrameError(f"frame version {version}; this is version {VERSION}")
        if not _LEAD.size + _BODY.size + _CRC.size <= size <= _MOST_HEADER:
            raise FrameError(f"a header says that it takes {size} bytes; at most {_MOST_HEADER} are allowed")
        whole = lead + bytes(read(size - _LEAD.size))
        if zlib.crc32(whole[: -_CRC.size]) != _CRC.unpack(whole[-_CRC.size :])[0]:
            raise FrameError("the header is damaged: its checksum does not match")
        try:
            header = cls._parsed(whole, layout, limit)
        except FrameError:
            raise
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise FrameError(f"the header describes no profile of ours: {error}") from error
        if header.packed != whole:
            raise FrameError("the header is not written as this version writes it")
        return header

    @classmethod
    def _parsed(cls, whole: bytes, layout: KVLayout, limit: int) -> Self:
        fields = _BODY.unpack_from(whole, _LEAD.size)
        (
            layers,
            kv_heads,
            head_dim,
            dtype,
            start,
            tokens,
            fingerprint,
            state,
            count,
            quantizer,
            codec,
            params,
            metadata,
        ) = fields
        shape, own = (layers, kv_heads, head_dim), (layout.layers, layout.kv_heads, layout.head_dim)
        if shape != own or dtype != DTYPE_IDS[layout.dtype]:
            raise FrameError(f"a frame of another model: {shape}, dtype id {dtype}; this one is {layout}")
        if fingerprint != layout.fingerprint:
            raise FrameError("a frame of another model: same shape, other weights or rotary embedding")
        if tokens < 1 or layout.raw_bytes(tokens) > limit:
            raise FrameError(f"a frame of {tokens} tokens, {layout.raw_bytes(tokens)} bytes of KV; allowed are {limit}")
        if count > MOST_TRANSFORMS or params > _MOST_JSON or metadata > _MOST_JSON:
            raise FrameError(f"{count} transforms, {params} and {metadata} bytes of JSON are more than allowed")
        at = _LEAD.size + _BODY.size + count
        if at + params + metadata + _CRC.size != len(whole):
            raise FrameError("the parts of the header do not add up to its length")
        ids, given = whole[at - count : at], json.loads(whole[at : at + params])
        if not isinstance(given, list) or len(given) != count + 2:
            raise FrameError(f"parameters of {count + 2} parts are needed")
        profile = Profile(
            tuple(TRANSFORMS.of_format(index, values) for index, values in zip(ids, given, strict=False)),
            QUANTIZERS.of_format(quantizer, given[-2]),
            CODECS.of_format(codec, given[-1]),
        )
        return cls(profile, layout, start, tokens, state, json.loads(whole[at + params : at + params + metadata]))

    def require_state(self, assets: Assets) -> None:
        """Raise FrameError where ``assets`` are not those that the frame was made with."""
        self.profile.codec.require()
        try:
            state = self.profile.state(assets)
        except ValueError as error:
            raise FrameError(str(error)) from error
        if state != self.state:
            raise FrameError("the sender's affine maps or rotary keys were other ones than the receiver's")


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
