"""Who wins where: tables of judged profiles brought to the statements of KVServe's Figure 3 and Table 1."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from diffkv_repro.evaluation.intervals import Interval

NONE = "none"  # no compression: always good enough, at a ratio of 1


def best_of(summary: pd.DataFrame, names: Sequence[str], threshold: float) -> dict[str, tuple[str, float]]:
    """Of each workload the profile among ``names`` with the highest ratio that keeps ``threshold`` of the quality.

    ``summary`` is that of :func:`~diffkv_repro.evaluation.profile_quality.summarise`. Without compression the ratio is
    1, so whatever does not pass or does not shrink the cache loses to ``none``.
    """
    return {
        workload: _best(dict(zip(own["profile"], own["ratio"], strict=True)), set(names), _passing(own, threshold))
        for workload, own in summary.groupby("workload", sort=False)
    }


def share_won(best: Mapping[str, tuple[str, float]]) -> float:
    """Largest share of the workloads that one profile wins; no compression is nobody's win."""
    counts = Counter(name for name, _ in best.values() if name != NONE)
    return max(counts.values(), default=0) / len(best)


def chance_of_one_winner(
    judged: pd.DataFrame,
    texts: Sequence[str],
    names: Sequence[str],
    threshold: float,
    *,
    seed: int = 0,
    resamples: int = 2000,
) -> float:
    """Share of bootstrap resamples of all workloads' items in which one profile of ``names`` wins every workload.

    ``judged`` holds one row an item and profile; ``texts`` are the workloads that are scored by likelihood.
    """
    rng = np.random.default_rng(seed)
    winners: list[list[str]] = []
    for workload, own in judged.groupby("workload", sort=False):
        profiles, relative = _resampled(own, workload in texts, rng, resamples)
        ratios = (1 / own.groupby("profile")["ratio"].apply(lambda part: (1 / part).mean())).to_dict()
        passing = [set(profiles[column]) for column in (relative >= threshold).T]
        winners.append([_best(ratios, set(names), there)[0] for there in passing])
    return sum(len(set(one)) == 1 and one[0] != NONE for one in zip(*winners, strict=True)) / resamples


def mean_relative(
    judged: pd.DataFrame, texts: Sequence[str], profile: str, *, seed: int = 0, resamples: int = 2000
) -> Interval:
    """Relative quality of ``profile``, mean over workloads, with the interval of resampling each workload's items."""
    rng, means, mean = np.random.default_rng(seed), [], []
    for workload, own in judged[judged["profile"] == profile].groupby("workload", sort=False):
        means.append(_resampled(own, workload in texts, rng, resamples)[1][0])
        score, plain = own["score"].mean(), own["plain"].mean()
        mean.append(np.exp(score - plain) if workload in texts else score / plain)
    low, high = np.quantile(np.mean(means, axis=0), [0.025, 0.975])
    return Interval(float(np.mean(mean)), float(low), float(high), len(judged[judged["profile"] == profile]))


def _resampled(
    own: pd.DataFrame, likelihood: bool, rng: np.random.Generator, resamples: int
) -> tuple[pd.Index, np.ndarray]:
    """Profiles of one workload, and their relative quality [profiles, resamples] on the same resampled items."""
    score = own.pivot(index="profile", columns="item", values="score")
    plain = own[own["profile"] == score.index[0]].sort_values("item")["plain"].to_numpy()
    draws = rng.integers(0, len(plain), size=(resamples, len(plain)))
    found, base = score.to_numpy()[:, draws].mean(axis=2), plain[draws].mean(axis=1)
    if likelihood:
        return score.index, np.exp(found - base)
    return score.index, np.where(base == 0, 1.0, found / np.where(base == 0, 1.0, base))


def unified(summary: pd.DataFrame, names: Sequence[str], threshold: float) -> tuple[str, float]:
    """The one profile for all workloads: the highest mean ratio of those that keep ``threshold`` on each of them."""
    chosen = summary[summary["profile"].isin(names)]
    means = {
        profile: float(own["ratio"].mean())
        for profile, own in chosen.groupby("profile", sort=False)
        if (own["relative"] >= threshold).all()
    }
    return _best(means, set(names), set(means))


def grid(summary: pd.DataFrame, column: str) -> pd.DataFrame:
    """``column`` with a row a profile and a column a workload, in their own order."""
    table = summary.pivot(index="profile", columns="workload", values=column)
    return table.loc[summary["profile"].unique(), summary["workload"].unique()]


def _passing(own: pd.DataFrame, threshold: float) -> set[str]:
    return set(own.loc[own["relative"] >= threshold, "profile"])


def _best(ratios: Mapping[str, float], names: set[str], passing: set[str]) -> tuple[str, float]:
    among = [(ratio, name) for name, ratio in ratios.items() if name in names & passing and ratio > 1]
    ratio, name = max(among, default=(1.0, NONE))
    return name, ratio
