"""How few documents a quality needs: stratified samples, and intervals against the full set (KVServe, Figure 8)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean of the full set as a sample of ``n`` of its ``of`` documents shows it, with its confidence interval."""

    mean: float
    low: float
    high: float
    n: int
    of: int

    @property
    def margin(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def stratified(strata: Sequence[str], count: int, *, seed: int = 0) -> list[int]:
    """``count`` documents in proportion to their ``strata``, drawn by seed within each; sorted.

    Shares are rounded to whole documents by their largest remainders (ties by the order of the strata); a stratum gets
    its first document before any gets a second where ``count`` allows. Raises ValueError for more than there are.
    """
    if not 1 <= count <= len(strata):
        raise ValueError(f"{count} documents are wanted; allowed are 1 to {len(strata)}")
    random = np.random.default_rng(seed)
    groups = _groups(strata)
    sizes = np.array([len(own) for own in groups])
    least = np.minimum(1, sizes) if count >= len(groups) else np.zeros(len(groups), dtype=int)
    wanted = sizes * count / sizes.sum()
    taken = np.maximum(np.floor(wanted).astype(int), least)
    while taken.sum() != count:
        lacks = wanted - taken
        if taken.sum() < count:
            place = int(np.where(taken < sizes, lacks, -np.inf).argmax())
            taken[place] += 1
        else:
            place = int(np.where(taken > least, lacks, np.inf).argmin())
            taken[place] -= 1
    chosen = [random.choice(own, size=n, replace=False) for own, n in zip(groups, taken, strict=True) if n]
    return sorted(int(index) for index in np.concatenate(chosen))


def estimate(
    values: Sequence[float], strata: Sequence[str], full: Sequence[str], *, confidence: float = 0.95
) -> Estimate:
    """The mean over the ``full`` set (a stratum a document) from ``values`` of a stratified sample without repeats.

    Strata weigh what they weigh in the full set; the variance has the correction of a finite set, so that a sample of
    everything is certain, and a stratum with one document sampled takes the spread of all. The interval is Student's
    with as many degrees of freedom as documents beyond the strata (at least one). Raises ValueError for no value, or a
    stratum that the full set lacks.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array) or len(array) != len(strata) or len(array) > len(full):
        raise ValueError(f"{len(array)} values, {len(strata)} strata, full set of {len(full)}: one stratum a value")
    unknown = sorted(set(strata) - set(full))
    if unknown:
        raise ValueError(f"stratum {unknown[0]!r} is not of the full set; it has {', '.join(sorted(set(full)))}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")
    total, seen = len(full), {name: array[[own == name for own in strata]] for name in dict.fromkeys(strata)}
    there = {name: sum(own == name for own in full) for name in seen}
    within = _within(seen)
    covered = sum(there.values())
    mean = sum(there[name] / covered * own.mean() for name, own in seen.items())
    variance = 0.0
    for name, own in seen.items():
        spread = own.var(ddof=1) if len(own) > 1 else within
        variance += (there[name] / covered) ** 2 * (1 - len(own) / there[name]) * spread / len(own)
    if len(array) == 1 and total > 1:
        return Estimate(float(mean), -math.inf, math.inf, 1, total)
    from scipy.stats import t

    reach = float(t.ppf((1 + confidence) / 2, max(1, len(array) - len(seen)))) * math.sqrt(variance)
    return Estimate(float(mean), float(mean) - reach, float(mean) + reach, len(array), total)


def documents_needed(values: Sequence[float], strata: Sequence[str], margin: float, *, confidence: float = 0.95) -> int:
    """So many documents, drawn in proportion, give an interval of +-``margin``, if they spread as ``values`` do.

    ``values`` are a pilot of at least two documents; the full set is taken to be endless.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2 or len(array) != len(strata) or not margin > 0:
        raise ValueError(f"{len(array)} values, {len(strata)} strata, margin {margin}: two values, a margin above 0")
    from scipy.stats import norm

    within = _within({name: array[[own == name for own in strata]] for name in dict.fromkeys(strata)})
    return max(1, math.ceil((float(norm.ppf((1 + confidence) / 2)) / margin) ** 2 * within))


def _within(seen: dict[str, np.ndarray]) -> float:
    """Variance within strata, pooled; that of all values where every stratum has a single one."""
    freedom = sum(len(own) - 1 for own in seen.values())
    if freedom:
        return float(sum(((own - own.mean()) ** 2).sum() for own in seen.values()) / freedom)
    everything = np.concatenate(list(seen.values()))
    return float(everything.var(ddof=1)) if len(everything) > 1 else 0.0


def _groups(strata: Sequence[str]) -> list[np.ndarray]:
    return [np.flatnonzero([own == name for own in strata]) for name in dict.fromkeys(strata)]
