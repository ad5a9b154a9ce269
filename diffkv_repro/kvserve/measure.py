"""What a profile costs and saves on a cache: the ratio, the two throughputs of equation (1), the error it leaves."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from diffkv_repro.core.timing import peak_memory
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
    return measure_all([profile], kv, layout, assets=assets, repeats=repeats)[0]


def measure_all(
    profiles: Sequence[Profile], kv: KV, layout: KVLayout, *, assets: Assets | None = None, repeats: int = 3
) -> list[ProfileRun]:
    """:func:`measure` for several profiles, which take turns: a machine that is busy for a while slows all alike."""
    require_whole("repeats", repeats, 1)
    first = [_turn(profile, kv, layout, assets) for profile in profiles]
    seconds: list[list[tuple[float, float]]] = [[] for _ in profiles]
    for _ in range(repeats):
        for profile, own in zip(profiles, seconds, strict=True):
            turn = _turn(profile, kv, layout, assets)
            own.append((turn.encode, turn.decode))
    return [_run(profile, kv, layout, turn, own) for profile, turn, own in zip(profiles, first, seconds, strict=True)]


def peak_layers(profile: Profile, kv: KV, layout: KVLayout, *, assets: Assets | None = None) -> float:
    """Peak memory of encoding ``kv`` piece by piece, beyond the cache itself, in bytes of one of its layers.

    What the process holds is read from the system, so layers of less than some megabytes drown in its noise.
    """
    parts = {"start": kv.start, "assets": assets}
    sum(map(len, profile.stream(kv.layers, layout, kv.tokens, **parts)))  # tables that are kept are not counted
    with peak_memory() as seen:
        sum(map(len, profile.stream(kv.layers, layout, kv.tokens, **parts)))
    return seen.growth * layout.layers / layout.raw_bytes(kv.tokens)


def repeated(kv: KV, layout: KVLayout, times: int, *, layers: int = 2) -> tuple[KV, KVLayout]:
    """The first ``layers`` of a cache said ``times`` over: one as long as it takes to see what memory it needs."""
    pairs = [(key.repeat(1, times, 1), value.repeat(1, times, 1)) for key, value in kv.pairs[:layers]]
    return KV.of(pairs, kv.start), replace(layout, layers=layers)


@dataclass(frozen=True)
class _Turn:
    encode: float
    decode: float
    data: bytes
    frame: Frame
    got: KV


def _turn(profile: Profile, kv: KV, layout: KVLayout, assets: Assets | None) -> _Turn:
    started = time.perf_counter()
    data = profile.encode(kv, layout, assets=assets).to_bytes()
    between = time.perf_counter()
    frame = Frame.from_bytes(data, layout, assets=assets)
    got = frame.decode()
    return _Turn(between - started, time.perf_counter() - between, data, frame, got)


def _run(profile: Profile, kv: KV, layout: KVLayout, first: _Turn, seconds: list[tuple[float, float]]) -> ProfileRun:
    raw, got = layout.raw_bytes(kv.tokens), first.got
    kept = [
        torch.ones(layer.key.shape[:2], dtype=torch.bool) if layer.kept is None else layer.kept for layer in got.layers
    ]
    encode, decode = (raw / statistics.median(column) for column in zip(*seconds, strict=True))
    return ProfileRun(
        profile=profile,
        tokens=kv.tokens,
        raw_bytes=raw,
        frame_bytes=len(first.data),
        code_bytes=first.frame.code_bytes,
        ratio=first.frame.ratio,
        code_ratio=first.frame.code_ratio,
        encode=encode,
        decode=decode,
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
