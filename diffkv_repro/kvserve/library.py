"""A library of measured profiles in a file: what a controller that serves requests chooses from."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.files import write_text
from diffkv_repro.kvserve.controller import Controller, ControllerSettings
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile
from diffkv_repro.kvserve.profile import Profile

_MEASURES = ("ratio", "encode", "decode")


@dataclass(frozen=True)
class LibraryEntry:
    """A profile with what it was measured to do; ``raw_bytes`` of the cache that it was measured on."""

    profile: Profile
    measured: MeasuredProfile
    raw_bytes: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.raw_bytes) and self.raw_bytes > 0):
            raise ValueError(f"raw_bytes of {self.measured.name} is {self.raw_bytes}; it must be finite and above 0")


@dataclass(frozen=True)
class ProfileLibrary:
    """Entries under names of their own (those of their measures); an entry may come once for each size of cache.

    Raises ValueError for no entry, one name with two profiles, and the name "none", which stands for no compression.
    """

    entries: tuple[LibraryEntry, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        if not self.entries:
            raise ValueError("a library of no profile at all; give at least one")
        for entry in self.entries:
            name = entry.measured.name
            if name == NO_COMPRESSION.name:
                raise ValueError(f"{name!r} stands for no compression; give profile {entry.profile} another name")
            if entry.profile != self.profile(name):
                raise ValueError(f"{name!r} is both {self.profile(name)} and {entry.profile}")

    def profile(self, name: str) -> Profile:
        """The profile of a decision's name; the exact one, uncoded, for "none". Raises ValueError with the names."""
        if name == NO_COMPRESSION.name:
            return Profile()
        found = next((entry.profile for entry in self.entries if entry.measured.name == name), None)
        if found is None:
            raise ValueError(f"unknown profile {name!r}; the library has {', '.join(self.names)}")
        return found

    @property
    def names(self) -> list[str]:
        """Of all profiles, each once."""
        return list(dict.fromkeys(entry.measured.name for entry in self.entries))

    def controller(self, settings: ControllerSettings | None = None) -> Controller:
        """A controller that chooses among them, by the size of the request where there are several."""
        sizes: dict[float, list[MeasuredProfile]] = {}
        for entry in self.entries:
            sizes.setdefault(entry.raw_bytes, []).append(entry.measured)
        return Controller(sizes, settings)

    def save(self, path: Path | str) -> None:
        """Write YAML that :meth:`load` reads. Raises WriteError where the disk refuses."""
        write_text(
            Path(path), yaml.safe_dump({"profiles": [_written(entry) for entry in self.entries]}, sort_keys=False)
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The library in a YAML file: ``profiles``, a list of ``name``, ``profile`` (one of the named ones, or its
        parts), ``ratio``, ``encode``, ``decode`` and perhaps ``quality`` and ``raw_bytes``.

        Raises ValueError naming the file and what is wrong with it.
        """
        try:
            document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            if not isinstance(document, Mapping) or set(document) != {"profiles"}:
                raise ValueError("it needs one key, profiles, with a list")
            return cls(tuple(map(_read, document["profiles"])))
        except OSError as error:
            raise ValueError(f"profile library {path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"profile library {path}: {first_line(error)}") from error


def profile_of(given: Any) -> Profile:
    """A profile from its name or from the mapping of its parts. Raises ValueError for anything else."""
    return Profile.named(given) if isinstance(given, str) else Profile.from_dict(given)


def _read(given: Any) -> LibraryEntry:
    required, optional = {"name", "profile", *_MEASURES}, {"quality", "raw_bytes"}
    if not isinstance(given, Mapping) or required - set(given):
        raise ValueError(f"an entry is {given!r}; needed are {', '.join(sorted(required))}")
    unknown = sorted(map(str, set(given) - required - optional))
    if unknown:
        raise ValueError(f"an entry has no {unknown[0]!r}; allowed are {', '.join(sorted(required | optional))}")
    numbers = [float(given[key]) for key in _MEASURES]
    quality = {str(key): float(value) for key, value in (given.get("quality") or {}).items()}
    measured = MeasuredProfile(str(given["name"]), *numbers, quality)
    return LibraryEntry(profile_of(given["profile"]), measured, float(given.get("raw_bytes", 1.0)))


def _written(entry: LibraryEntry) -> dict[str, Any]:
    one = entry.measured
    found = {"name": one.name, "profile": entry.profile.as_dict(), "raw_bytes": float(entry.raw_bytes)}
    return found | {key: float(getattr(one, key)) for key in _MEASURES} | {"quality": dict(one.quality)}


def entries_of(runs: Iterable[Any], quality: Mapping[str, Mapping[str, float]] | None = None) -> list[LibraryEntry]:
    """Entries of :func:`measure_all`'s runs, named as their profiles print; ``quality`` by that name and workload."""
    known = quality or {}
    return [LibraryEntry(run.profile, run.measured(known.get(str(run.profile))), run.raw_bytes) for run in runs]
