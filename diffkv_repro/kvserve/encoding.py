"""Profiles as points that a Gaussian process can compare (KVServe, Algorithm 1, line 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from diffkv_repro.kvserve.profile import Profile

_PARTS = ("transforms", "quantizer", "codec")


def describe(profile: Profile) -> dict[str, float | str]:
    """A profile's choices by name: numbers as they are, everything else as text.

    A parameter bears the name of its part, so that two quantizers' parameters are never compared.
    """
    found: dict[str, float | str] = {}
    data = profile.as_dict()
    for kind in _PARTS:
        parts: list[Mapping[str, Any]] = data[kind] if kind == "transforms" else [data[kind]]
        found[kind] = " + ".join(str(part["name"]) for part in parts) or "none"
        for part in parts:
            for name, value in part.items():
                if name != "name":
                    number = isinstance(value, int | float) and not isinstance(value, bool)
                    found[f"{kind}.{part['name']}.{name}"] = float(value) if number else repr(value)
    return found


def one_hot_min_max(rows: Sequence[Mapping[str, float | str]]) -> np.ndarray:
    """Heterogeneous encoding [rows, columns] in [0, 1]: one-hot for text, min-max over all rows for numbers.

    What a row lacks is 0; columns that are the same for all rows are left out.
    """
    columns: list[np.ndarray] = []
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name) for row in rows]
        texts = sorted({value for value in values if isinstance(value, str)})
        columns += [np.array([float(value == text) for value in values]) for text in texts]
        numbers = np.array([value if isinstance(value, float) else np.nan for value in values])
        known = numbers[~np.isnan(numbers)]
        if len(known) and known.max() > known.min():
            columns.append(np.nan_to_num((numbers - known.min()) / (known.max() - known.min())))
    kept = [column for column in columns if column.max() > column.min()]
    return np.stack(kept, axis=1) if kept else np.zeros((len(rows), 1))


def raw_ids(rows: Sequence[Mapping[str, float | str]]) -> np.ndarray:
    """The ablation without encoding [rows, columns]: numbers unscaled, text as the number of its place in the list."""
    columns: list[list[float]] = []
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name, 0.0) for row in rows]
        order = {text: float(place) for place, text in enumerate(sorted({str(value) for value in values}))}
        columns.append([value if isinstance(value, float) else order[str(value)] for value in values])
    return np.array(columns).T if columns else np.zeros((len(rows), 1))


def level_spread(profile: Profile) -> float:
    """Largest less smallest number of levels that the quantizer uses; 0 where it has a single one."""
    levels = [value for name, value in profile.quantizer.params().items() if "_high" in name or "_low" in name]
    return float(max(levels) - min(levels)) if levels else 0.0


@dataclass(frozen=True, eq=False)
class Pool:
    """What a search chooses from: ``names`` that differ, their ``ratios`` [n], known before it begins, ``points`` [n,
    columns] as encoded and ``raw`` as not, ``groups`` [n] of equal quantizer and axes, and ``spread`` [n] of levels.
    """

    names: tuple[str, ...]
    ratios: np.ndarray
    points: np.ndarray
    raw: np.ndarray
    groups: np.ndarray
    spread: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.names)
        if not count or len(set(self.names)) != count:
            raise ValueError(f"a pool of {count} candidates; there must be at least one, and their names must differ")
        for name in ("ratios", "points", "raw", "groups", "spread"):
            own = np.asarray(getattr(self, name))
            if len(own) != count or not np.isfinite(own).all():
                raise ValueError(f"{name} of the pool is {own.shape}; needed are finite numbers of {count} candidates")
            object.__setattr__(self, name, own)
        if not (self.ratios > 0).all():
            raise ValueError(f"the smallest ratio of the pool is {self.ratios.min()}; it must be above 0")

    @classmethod
    def of(cls, profiles: Sequence[Profile], ratios: Sequence[float]) -> Self:
        """The pool of ``profiles`` with a measured ratio each."""
        rows = [describe(profile) for profile in profiles]
        kinds = [
            repr(sorted((k, v) for k, v in row.items() if k.startswith("quantizer") and isinstance(v, str)))
            for row in rows
        ]
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        return cls(
            names=tuple(profile.digest for profile in profiles),
            ratios=np.asarray(ratios, dtype=np.float64),
            points=one_hot_min_max(rows),
            raw=raw_ids(rows),
            groups=np.array([places[kind] for kind in kinds]),
            spread=np.array([level_spread(profile) for profile in profiles]),
        )

    def __len__(self) -> int:
        return len(self.names)
