"""What a profile costs and saves on a cache: the ratio, the two throughputs of equation (1), the error it leaves."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from diffkv_repro.core.processes import Apart
from diffkv_repro.core.timing import peak_memory
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.registry import require_whole

_ANSWER_SECONDS = 600


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
    profiles: Sequence["Profile | Arm"], kv: KV, layout: KVLayout, *, assets: Assets | None = None, repeats: int = 3
) -> list[ProfileRun]:
    """:func:`measure` for several profiles, which take turns: a machine that is busy for a while slows all alike.

    Instead of a profile there may be an :class:`Arm`, which comes to a frame of the same cache in its own way.
    """
    require_whole("repeats", repeats, 1)
    arms = [_Encoding(own, kv, layout, assets) if isinstance(own, Profile) else own for own in profiles]
    first = [arm.turn() for arm in arms]
    seconds: list[list[tuple[float, float]]] = [[] for _ in arms]
    for _ in range(repeats):
        for arm, own in zip(arms, seconds, strict=True):
            turn = arm.turn()
            own.append((turn.encode, turn.decode))
    return [_run(arm.profile, kv, layout, turn, own) for arm, turn, own in zip(arms, first, seconds, strict=True)]


def peak_layers(profile: Profile, kv: KV, layout: KVLayout, *, assets: Assets | None = None) -> float:
    """Peak memory of encoding ``kv`` piece by piece, beyond the cache itself, in bytes of one of its layers.

    What the process holds is read from the system, so layers of less than some megabytes drown in its noise.
    """
    parts = {"start": kv.start, "assets": assets}
    sum(map(len, profile.stream(kv.layers, layout, kv.tokens, **parts)))  # tables that are kept are not counted
    with peak_memory() as seen:
        sum(map(len, profile.stream(kv.layers, layout, kv.tokens, **parts)))
    return seen.growth * layout.layers / layout.raw_bytes(kv.tokens)


def peaks_apart(lines: Sequence[str], kv: KV, layout: KVLayout, times: int) -> dict[str, float]:
    """:func:`peak_layers` by profile line, of the first layers of ``kv`` said ``times`` over, in a process of its own.

    What a process has allocated and freed before decides which pages it takes anew, up to a third of a layer.
    """
    process = Apart(_peaks, tuple(lines), kv, layout, times)
    try:
        return dict(process.results(_ANSWER_SECONDS))
    finally:
        process.close()


def _peaks(lines: Sequence[str], kv: KV, layout: KVLayout, times: int) -> Iterator[tuple[str, float]]:
    torch.set_num_threads(1)
    wide, shape = repeated(kv, layout, times)
    for line in lines:
        yield line, peak_layers(Profile.parse(line), wide, shape)


def repeated(kv: KV, layout: KVLayout, times: int, *, layers: int = 2) -> tuple[KV, KVLayout]:
    """The first ``layers`` of a cache said ``times`` over: one as long as it takes to see what memory it needs."""
    pairs = [(key.repeat(1, times, 1), value.repeat(1, times, 1)) for key, value in kv.pairs[:layers]]
    return KV.of(pairs, kv.start), replace(layout, layers=layers)


@dataclass(frozen=True)
class Turn:
    """One time through: seconds to the frame's bytes, ``data``, and from them on; and the frame that arrived."""

    encode: float
    decode: float
    data: bytes
    frame: Frame


class Arm(Protocol):
    """A way to a frame of ``profile`` and back."""

    profile: Profile

    def turn(self) -> Turn:
        """Go it once, by the clock."""
        ...


@dataclass(frozen=True)
class _Encoding:
    profile: Profile
    kv: KV
    layout: KVLayout
    assets: Assets | None

    def turn(self) -> Turn:
        started = time.perf_counter()
        data = self.profile.encode(self.kv, self.layout, assets=self.assets).to_bytes()
        between = time.perf_counter()
        frame = Frame.from_bytes(data, self.layout, assets=self.assets)
        frame.decode()
        return Turn(between - started, time.perf_counter() - between, data, frame)


def _run(profile: Profile, kv: KV, layout: KVLayout, first: Turn, seconds: list[tuple[float, float]]) -> ProfileRun:
    raw, got = layout.raw_bytes(kv.tokens), first.frame.decode()
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
