"""Profiles that no other beats in quality, ratio and measured latency together, as a library on disk (Figure 10)."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.files import write_text
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.profile import Profile

FORMAT = 1


def non_dominated(
    quality: Sequence[float], ratio: Sequence[float], seconds: Sequence[float] | None = None, *, margin: float = 0.0
) -> np.ndarray:
    """Which points [n] no other is as good as in all of quality (up), ratio (up) and ``seconds`` (down), and better in
    one. Without ``seconds`` the front is of two dimensions. Times within a factor 1 + ``margin`` count as equal.

    Raises ValueError for lists of unequal length and numbers that are not finite.
    """
    given = (quality, ratio, [0.0] * len(ratio) if seconds is None else seconds)
    rows = [np.asarray(own, dtype=np.float64) for own in given]
    shapes = [own.shape for own in rows]
    if len(set(shapes)) != 1 or rows[0].ndim != 1 or not all(np.isfinite(own).all() for own in rows):
        raise ValueError(f"quality, ratio and seconds are {shapes}; needed are finite numbers, as many of each")
    if not len(ratio):
        return np.ones(0, dtype=bool)
    if not (margin >= 0 and (rows[2] >= 0).all()):
        raise ValueError(f"margin is {margin}, the least time {rows[2].min()}; neither may be negative")
    high, more, slow = rows
    kept = np.ones(len(high), dtype=bool)
    for place in range(len(high)):
        no_worse = (high >= high[place]) & (more >= more[place]) & (slow <= slow[place] * (1 + margin))
        better = (high > high[place]) | (more > more[place]) | (slow * (1 + margin) < slow[place])
        kept[place] = not (no_worse & better).any()
    return kept


@dataclass(frozen=True)
class Entry:
    """A profile as it was found for one model, workload and device.

    ``quality`` relative to the uncompressed cache with its interval, on ``documents``; ``ratio`` true; ``encode`` and
    ``decode`` bytes of raw KV a second, on a cache of ``raw_bytes``.
    """

    model: str
    weights: str
    workload: str
    device: str
    profile: Profile
    quality: float
    ratio: float
    encode: float
    decode: float
    raw_bytes: int
    low: float | None = None
    high: float | None = None
    documents: int = 1
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("model", "workload", "device"):
            if not getattr(self, name):
                raise ValueError(f"{name} of {self.profile} is empty; an entry is of one")
        if not self.raw_bytes > 0:
            raise ValueError(f"raw_bytes of {self.profile} is {self.raw_bytes}; it must be above 0")
        self.measured()

    @property
    def codec_seconds(self) -> float:
        """Seconds of encoding and decoding a raw byte."""
        return 1 / self.encode + 1 / self.decode

    @property
    def key(self) -> tuple[str, str, str, str, int, str]:
        """What an entry is of: a later one of the same key takes its place."""
        return self.model, self.weights, self.workload, self.device, self.raw_bytes, self.profile.digest

    def measured(self) -> MeasuredProfile:
        """As the latency model and the controller take it."""
        return MeasuredProfile(str(self.profile), self.ratio, self.encode, self.decode, {self.workload: self.quality})


@dataclass(frozen=True)
class ProfileLibrary:
    """Entries of any models, workloads and devices: the table that the profiling engine leaves to the controller."""

    entries: tuple[Entry, ...] = ()

    def merged(self, more: Iterable[Entry]) -> Self:
        """With ``more`` entries; all that was there of the same model, workload and device gives way to them."""
        new = tuple(more)
        gone = {entry.key[:-1] for entry in new}
        return type(self)(tuple(entry for entry in self.entries if entry.key[:-1] not in gone) + new)

    def front(self, *, margin: float = 0.0) -> Self:
        """Of each model, workload and device only what no other profile beats."""
        groups: dict[tuple, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.key[:-1], []).append(entry)
        kept: list[Entry] = []
        for own in groups.values():
            columns = ([e.quality for e in own], [e.ratio for e in own], [e.codec_seconds for e in own])
            kept += [entry for entry, stays in zip(own, non_dominated(*columns, margin=margin), strict=True) if stays]
        return type(self)(tuple(kept))

    def for_controller(self, model: str, device: str) -> dict[float, list[MeasuredProfile]]:
        """What ``Controller`` takes: measured profiles by the raw bytes they were measured on.

        A profile found for several workloads is one with a quality for each, and the means of its ratios and times.
        Raises ValueError where there is nothing of ``model`` and ``device``, with what there is.
        """
        own = [entry for entry in self.entries if (entry.model, entry.device) == (model, device)]
        if not own:
            known = sorted({f"{entry.model} on {entry.device}" for entry in self.entries})
            raise ValueError(f"no profile of {model} on {device} in this library; it has {', '.join(known) or 'none'}")
        if len({entry.weights for entry in own}) > 1:
            raise ValueError(f"profiles of {model} were measured with several weights; search again with one of them")
        found: dict[float, dict[str, list[Entry]]] = {}
        for entry in own:
            found.setdefault(float(entry.raw_bytes), {}).setdefault(str(entry.profile), []).append(entry)
        return {size: [_one(same) for same in named.values()] for size, named in sorted(found.items())}

    def save(self, path: Path) -> Path:
        """Write JSON, whole or not at all."""
        rows = [asdict(entry) | {"profile": entry.profile.as_dict()} for entry in self.entries]
        return write_text(path, json.dumps({"format": FORMAT, "entries": rows}, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises ValueError naming the file for anything else."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}; this version reads {FORMAT}")
            rows = document["entries"]
            return cls(tuple(Entry(**row | {"profile": Profile.from_dict(row["profile"])}) for row in rows))
        except OSError as error:
            raise ValueError(f"profile library {path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"profile library {path} is damaged: {first_line(error)}") from error


def _one(same: Sequence[Entry]) -> MeasuredProfile:
    def rate(name: str) -> float:
        seconds = fmean(1 / getattr(entry, name) for entry in same)
        return 1 / seconds if seconds else math.inf

    quality = {entry.workload: entry.quality for entry in same}
    ratio = 1 / fmean(1 / entry.ratio for entry in same)
    return MeasuredProfile(str(same[0].profile), ratio, rate("encode"), rate("decode"), quality)
