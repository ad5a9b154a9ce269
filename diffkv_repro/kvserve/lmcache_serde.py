"""KVServe in LMCache: a serde named "kvserve", which keeps chunks of KV cache in an L2 store as compressed frames.

LMCache finds serdes by name only once the module that registers them is imported, and has no entry point for that. So
this module is a command as well: it registers the serde, and hands its arguments to LMCache's own command line.

    python -m diffkv_repro.kvserve.lmcache_serde server ... --l2-adapter '{"type": "fs", "base_path": "/cache",
      "serde": {"type": "kvserve", "profile": "int4", "kv_heads": 8}}'

Sizes: LMCache 0.5.6 reads a stored object back into a buffer of ``estimate_serialized_size`` bytes, and takes one of
any other length for damaged (its file adapter logs "Incomplete read"), so what is stored has to have exactly that size.
A fixed-rate profile (bit-packed codes) has one, found by encoding a chunk of zeros and one of random numbers. Any other
profile needs ``max_share``, the share of the raw bytes that a frame gets: shorter ones are padded, and save nothing
beyond it; a chunk that does not fit is not stored.

Written for LMCache 0.5 in its multiprocess mode, whose chunks are [2, layers, tokens, kv_heads * head_dim].
"""

import hashlib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any, Self

import torch

from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.engine_profiles import try_out
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.library import profile_of
from diffkv_repro.kvserve.registry import require_whole

SUPPORTED = (0, 5)
NAME = "kvserve"


def require_version(found: str) -> None:
    """Raise ImportError unless ``found`` is a version of LMCache that this serde was written for."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or (int(match[1]), int(match[2])) != SUPPORTED:
        raise ImportError(f"LMCache here is {found}; the serde follows the interface of {SUPPORTED[0]}.{SUPPORTED[1]}")


try:
    from lmcache.v1.distributed.serde import (
        AsyncSerdeProcessor,
        Deserializer,
        Serializer,
        get_registered_serde_types,
        register_serde_factory,
    )
except ImportError as error:
    raise ImportError(
        "diffkv_repro.kvserve.lmcache_serde is loaded beside LMCache, which is not installed here; "
        "docs/serving-vllm.md says how to make an environment with it"
    ) from error
require_version(version("lmcache"))


@dataclass(frozen=True)
class SerdeSettings:
    """``profile``: a profile's name, or its parts. ``kv_heads``: of a worker, for chunks do not say. ``max_share``: the
    share of the raw bytes that a frame may take, for profiles of no fixed rate. ``max_workers``: threads."""

    profile: Any
    kv_heads: int
    max_share: float | None = None
    max_workers: int = 1

    def __post_init__(self) -> None:
        require_whole("kv_heads", self.kv_heads, 1)
        require_whole("max_workers", self.max_workers, 1)
        share = self.max_share
        if share is not None and not (isinstance(share, int | float) and not isinstance(share, bool) and 0 < share < 2):
            raise ValueError(f"max_share is {share!r}; it must be a number between 0 and 2")
        profile_of(self.profile)

    @classmethod
    def from_kwargs(cls, given: Mapping[str, Any]) -> Self:
        """From the adapter's ``serde`` mapping. Raises ValueError for an unknown key, naming all allowed."""
        allowed = [item.name for item in fields(cls)]
        unknown = sorted(set(map(str, given)) - set(allowed))
        if unknown:
            raise ValueError(f"serde {NAME} has no {unknown[0]!r}; allowed are {', '.join(allowed)}")
        lacking = [name for name in ("profile", "kv_heads") if name not in given]
        if lacking:
            raise ValueError(f"serde {NAME} lacks {lacking[0]!r}")
        return cls(**given)


class FrameSizes:
    """Bytes that a chunk's frame takes in a store, by shape and dtype: what both directions agree on."""

    def __init__(self, settings: SerdeSettings) -> None:
        self.settings, self.profile = settings, profile_of(settings.profile)
        self._known: dict[tuple[tuple[int, ...], torch.dtype], int] = {}

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype, model: str = "") -> KVLayout:
        """Raises ValueError for chunks of another shape than [2, layers, tokens, kv_heads * head_dim]."""
        heads = self.settings.kv_heads
        if len(shape) != 4 or shape[0] != 2 or shape[3] % heads:
            raise ValueError(
                f"a chunk is {tuple(shape)}; supported are [2, layers, tokens, {heads} * head_dim], no latent attention"
            )
        return KVLayout(shape[1], heads, shape[3] // heads, dtype, model=model)

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Raises ValueError for a profile of no fixed rate where there is no ``max_share``."""
        key = (tuple(shape), dtype)
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        layout, tokens = self.layout(shape, dtype), shape[2]
        try_out(self.profile, layout, Assets())
        if self.settings.max_share is not None:
            return math.ceil(self.settings.max_share * layout.raw_bytes(tokens))
        sizes = []
        random = torch.Generator().manual_seed(0)
        for chunk in (torch.zeros(shape), torch.randn(shape, generator=random)):
            frame = self.profile.encode(_kv(chunk.to(dtype), layout), layout, metadata=_about(b""))
            sizes.append(frame.nbytes)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"profile {self.profile} has no fixed rate ({sizes[0]} bytes for zeros, {sizes[1]} for random numbers) "
                "and LMCache stores objects of one size: set max_share, the share of the raw bytes that a frame gets"
            )
        return sizes[0]


class KVServeSerializer(Serializer):
    """A chunk into a frame, padded with zeros to the size that was promised."""

    def __init__(self, sizes: FrameSizes) -> None:
        self.sizes = sizes

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Bytes written. Raises ValueError for a chunk whose frame is larger than promised."""
        chunk = _tensor(src)
        shape = tuple(chunk.shape)
        size, layout = self.sizes.of(shape, chunk.dtype), self.sizes.layout(shape, chunk.dtype, _model(key))
        kv = _kv(chunk.detach().cpu(), layout)
        data = self.sizes.profile.encode(kv, layout, metadata=_about(_identity(key))).to_bytes()
        if len(data) > size:
            raise ValueError(f"a frame takes {len(data)} bytes and has {size}: it is not stored; raise max_share")
        place = _tensor(dst).view(torch.uint8).flatten()
        if place.numel() < size:
            raise ValueError(f"the buffer has {place.numel()} bytes; {size} are needed")
        place[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        place[len(data) : size].zero_()
        return size

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The one size of frames of such chunks."""
        if len(layout_desc.shapes) != 1:
            raise ValueError(f"a chunk has {len(layout_desc.shapes)} groups of layers; supported is 1")
        return self.sizes.of(tuple(layout_desc.shapes[0]), layout_desc.dtypes[0])


class KVServeDeserializer(Deserializer):
    """A frame into a chunk. Raises FrameError for one that is damaged, another model's, or of another chunk."""

    def __init__(self, sizes: FrameSizes) -> None:
        self.sizes = sizes

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        chunk = _tensor(dst)
        layout = self.sizes.layout(tuple(chunk.shape), chunk.dtype, _model(key))
        data, at = memoryview(_tensor(src).view(torch.uint8).flatten().cpu().numpy()), 0

        def take(count: int) -> memoryview:  # what follows the frame is padding
            nonlocal at
            if count > len(data) - at:
                raise FrameError(f"truncated: {count} bytes are needed at byte {at}, and {len(data) - at} are left")
            at += count
            return data[at - count : at]

        frame = Frame.read(take, layout, limit=layout.raw_bytes(chunk.shape[2]))
        header = frame.header
        if dict(header.metadata) != _about(_identity(key)) or (header.start, header.tokens) != (0, chunk.shape[2]):
            raise FrameError("it is the frame of another chunk")
        # Decoded as a whole before anything is written: a chunk is whole or untouched.
        for place, layer in enumerate(list(frame.layers())):
            chunk[0, place].copy_(_flat(layer.key))
            chunk[1, place].copy_(_flat(layer.value))


def create(kwargs: Mapping[str, Any]) -> AsyncSerdeProcessor:
    """The processor of an adapter's ``serde`` settings."""
    settings = SerdeSettings.from_kwargs(kwargs)
    sizes = FrameSizes(settings)
    return AsyncSerdeProcessor(KVServeSerializer(sizes), KVServeDeserializer(sizes), max_workers=settings.max_workers)


def register() -> None:
    """Make the serde known to LMCache; once or more often."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, create)


def _kv(chunk: torch.Tensor, layout: KVLayout) -> KV:
    split = chunk.unflatten(3, (layout.kv_heads, layout.head_dim)).transpose(2, 3)
    return KV(tuple(LayerKV(key.contiguous(), value.contiguous()) for key, value in zip(*split, strict=True)))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).flatten(1)


def _tensor(obj: Any) -> torch.Tensor:
    if obj.tensor is None:
        raise ValueError(f"a memory object of LMCache has no tensor: {obj!r}")
    return obj.tensor


def _model(key: Any) -> str:
    return f"{key.model_name}@{key.kv_rank}"


def _identity(key: Any) -> bytes:
    return repr((key.chunk_hash, key.object_group_id, key.cache_salt)).encode()


def _about(identity: bytes) -> dict[str, str]:
    """Of one length, whatever it says: it must not change a frame's size."""
    return {"chunk": hashlib.sha256(identity).hexdigest()[:32]}


register()

if __name__ == "__main__":
    from lmcache.cli.main import main

    main(sys.argv[1:])
