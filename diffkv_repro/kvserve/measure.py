"""What a profile costs and saves on a cache: the ratio, the two throughputs of equation (1), the error it leaves."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.registry import require_whole


@dataclass(frozen=True)
class ProfileRun:
    """A profile on one cache: ``ratio`` 16-bit KV over all bytes sent, ``code_ratio`` over the codes alone; ``encode``
    and ``decode`` in bytes of raw KV (in the cache's own dtype) a second, medians; ``key_error`` and ``value_error``
    relative to the norm of keys and values, over the tokens that were kept; ``kept`` their share."""

    profile: Profile
    tokens: int
    raw_bytes: int
    frame_bytes: int
    code_bytes: int
    ratio: float
    code_ratio: float
    encode: float
    decode: float
    key_error: float
    value_error: float
    kept: float

    def measured(self, quality: Mapping[str, float] | None = None) -> MeasuredProfile:
        """For the latency model: speeds and ratio of the same raw bytes, those that would be sent otherwise."""
        return MeasuredProfile(
            str(self.profile), self.raw_bytes / self.frame_bytes, self.encode, self.decode, quality or {}
        )


def measure(
    profile: Profile, kv: KV, layout: KVLayout, *, assets: Assets | None = None, repeats: int = 3
) -> ProfileRun:
    """Encode ``kv``, send it to bytes and back, decode it; ``repeats`` times after one uncounted time.

    Encoding ends with the frame's bytes in one piece, decoding begins with them: both include the checksums.
    """
    require_whole("repeats", repeats, 1)
    encode, decode = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        data = profile.encode(kv, layout, assets=assets).to_bytes()
        between = time.perf_counter()
        frame = Frame.from_bytes(data, layout, assets=assets)
        got = frame.decode()
        encode.append(between - started)
        decode.append(time.perf_counter() - between)
    raw = layout.raw_bytes(kv.tokens)
    kept = [
        torch.ones(layer.key.shape[:2], dtype=torch.bool) if layer.kept is None else layer.kept for layer in got.layers
    ]
    return ProfileRun(
        profile=profile,
        tokens=kv.tokens,
        raw_bytes=raw,
        frame_bytes=len(data),
        code_bytes=frame.code_bytes,
        ratio=frame.ratio,
        code_ratio=frame.code_ratio,
        encode=raw / statistics.median(encode[1:]),
        decode=raw / statistics.median(decode[1:]),
        key_error=_error(got, kv, kept, 0),
        value_error=_error(got, kv, kept, 1),
        kept=sum(int(part.sum()) for part in kept) / sum(part.numel() for part in kept),
    )


def _error(got: KV, want: KV, kept: list[torch.Tensor], part: int) -> float:
    """Root of the squared error over the squared numbers, of all layers."""
    wrong = right = 0.0
    for a, b, mask in zip(got.pairs, want.pairs, kept, strict=True):
        x, y = a[part][mask].double(), b[part][mask].double()
        wrong += float((x - y).square().sum())
        right += float(y.square().sum())
    return (wrong / right) ** 0.5 if right else 0.0
