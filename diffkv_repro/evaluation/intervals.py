"""Bootstrap intervals over texts: a text is what is drawn, so tokens of one text never pass for independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` texts with its bootstrap 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}], n {self.n}"

    @property
    def note(self) -> str:
        """For a measurement's note."""
        return f"95 % interval {self.low:.4g} to {self.high:.4g} (bootstrap over {self.n} texts)"


def mean_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of ``values``, one a text, and the interval by resampling texts. Raises ValueError for none."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"values has shape {array.shape}; one number a text is needed")
    draws = np.random.default_rng(seed).integers(0, len(array), size=(resamples, len(array)))
    low, high = np.quantile(array[draws].mean(axis=1), [0.025, 0.975])
    return Interval(float(array.mean()), float(low), float(high), len(array))


def ratio_interval(
    over: Sequence[float], under: Sequence[float], *, seed: int = 0, resamples: int = 10_000
) -> Interval:
    """Quotient of two means over the same texts, resampled together.

    A resample whose lower mean is 0 says nothing and is left out. Raises ValueError where the lower mean itself is 0.
    """
    top, bottom = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(f"values have shapes {top.shape} and {bottom.shape}; one number a text is needed in each")
    if not bottom.mean():
        raise ValueError("the values to divide by have a mean of 0")
    draws = np.random.default_rng(seed).integers(0, len(top), size=(resamples, len(top)))
    over_draws, under_draws = top[draws].mean(axis=1), bottom[draws].mean(axis=1)
    there = under_draws != 0
    low, high = np.quantile(over_draws[there] / under_draws[there], [0.025, 0.975])
    return Interval(float(top.mean() / bottom.mean()), float(low), float(high), len(top))
