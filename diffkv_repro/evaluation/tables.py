"""Scored rows -> the numbers of notebook 05's figures and tables."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from diffkv_repro.diffkv.policy import CompressionPolicy
from diffkv_repro.evaluation.generation import TaskResult
from diffkv_repro.evaluation.intervals import mean_interval
from diffkv_repro.evaluation.sweep import difference, summarise


class Closest(NamedTuple):
    """Points of agreement that the nearest setting lacks, and which it is."""

    points: float
    note: str


def points(rows: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """A row a method: ``true``, ``nominal``, ``added_nll`` with its interval ``low``, ``high``, and ``agreement``."""
    losses, agreement = summarise(rows, "added_nll", seed=seed), summarise(rows, "agreement", seed=seed)
    size = rows.groupby("method", sort=False)[["nominal", "true"]].mean()
    return pd.DataFrame(
        {
            "method": method,
            "true": size.loc[method, "true"],
            "nominal": size.loc[method, "nominal"],
            "added_nll": loss.mean,
            "low": loss.low,
            "high": loss.high,
            "agreement": agreement[method].mean,
        }
        for method, loss in losses.items()
    )


def dominating(table: pd.DataFrame, own: Sequence[str], others: Sequence[str]) -> list[str]:
    """Those of ``others`` with fewer true bytes and less loss than some setting on the Pareto front of ``own``."""
    known = table.set_index("method")
    mine = known.loc[list(own)]
    front = mine[[not _beaten(row, mine) for _, row in mine.iterrows()]]
    return [name for name in others if any(_beats(known.loc[name], row) for _, row in front.iterrows())]


def nearest(table: pd.DataFrame, method: str, own: Sequence[str]) -> str:
    """The setting among ``own`` whose true bytes are nearest to those of ``method``."""
    known = table.set_index("method")["true"]
    return (known.loc[list(own)] - known[method]).abs().idxmin()


def best_within(
    table: pd.DataFrame, own: Sequence[str], *, loss: float | None = None, true: float | None = None
) -> str:
    """The smallest setting of ``own`` within ``loss`` nats, or the one of least loss within ``true`` bytes over FP16.

    Where none is within the bound, the one nearest to it.
    """
    mine = table.set_index("method").loc[list(own)]
    if (loss is None) == (true is None):
        raise ValueError("give either a loss or a share of true bytes")
    bound, limit, goal = ("added_nll", loss, "true") if true is None else ("true", true, "added_nll")
    allowed = mine[mine[bound] <= limit]
    return allowed[goal].idxmin() if len(allowed) else mine[bound].idxmin()


def closest_agreement(rows: pd.DataFrame, own: Sequence[str], *, true: float) -> Closest:
    """Among settings of at most ``true`` bytes over FP16: the fewest points of agreement below K8V8.

    100 points, all of them, where no setting is that small.
    """
    size = rows.groupby("method")["true"].mean()
    gaps = {name: difference(rows, "agreement", "K8V8", name) for name in own if size[name] <= true}
    if not gaps:
        return Closest(
            100.0, f"no setting is within {true:.0%} of FP16; the smallest is {size.loc[list(own)].min():.1%}"
        )
    name = min(gaps, key=lambda method: gaps[method].mean)
    gap = gaps[name]
    note = f"{name} at {size[name]:.1%}; 95 % interval {100 * gap.low:.2f} to {100 * gap.high:.2f} points"
    return Closest(100 * gap.mean, note)


def fractions(rows: pd.DataFrame, policy: CompressionPolicy) -> pd.DataFrame:
    """Shares of ``high``, ``low`` and ``pruned`` tokens in % under a policy of two tiers, by kind of text."""
    names = dict(zip(("high", "low"), map(str, policy.tiers), strict=True)) | {"pruned": "pruned"}
    result = {}
    for kind, own in rows[rows["method"] == policy.label].groupby("text", sort=False):
        tokens = pd.DataFrame(own["tokens"].tolist()).fillna(0)
        shares = tokens.div(tokens.sum(axis=1), axis=0).mean()
        result[kind] = {tier: 100 * shares.get(name, 0.0) for tier, name in names.items()}
    return pd.DataFrame(result).T


def memory_outside_window(rows: pd.DataFrame, policy: CompressionPolicy, tokens: int) -> float:
    """Nominal memory in % of the tokens that are not in the window of recent ones, mean over kinds of text."""
    shares = fractions(rows, policy)
    recent = 100 * min(policy.window / tokens, 1)
    high, low = (tier.nominal_ratio for tier in policy.tiers)
    kept = (shares["high"] - recent) * high + shares["low"] * low
    return float((100 * kept / (100 - recent)).mean())


def table_1(rows: pd.DataFrame, recalled: Mapping[str, Sequence[TaskResult]], *, seed: int = 0) -> pd.DataFrame:
    """Text for each method: loss on each kind of text, agreement, recall, nominal and true memory."""
    table = points(rows, seed=seed).set_index("method")
    result = {}
    for name, answers in recalled.items():
        row = {}
        for kind, own in rows[rows["method"] == name].groupby("text", sort=False):
            row[f"{kind}, nats"] = f"{own['added_nll'].mean():+.3f}"
        right = mean_interval([float(answer.correct) for answer in answers], seed=seed)
        row |= {
            "agreement": f"{table.loc[name, 'agreement']:.3f}",
            "recall": f"{right.mean:.2f} [{right.low:.2f}, {right.high:.2f}]",
            "nominal": f"{table.loc[name, 'nominal']:.1%}",
            "true": f"{table.loc[name, 'true']:.1%}",
        }
        result[name] = row
    return pd.DataFrame(result).T.rename_axis("method")


def table_2(rows: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Text for each method: loss with its interval over texts, agreement, memory."""
    result = {}
    for _, row in points(rows, seed=seed).iterrows():
        result[row["method"]] = {
            "added nats": f"{row['added_nll']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
            "agreement": f"{row['agreement']:.3f}",
            "n": len(rows["window"].unique()),
            "nominal": f"{row['nominal']:.1%}",
            "true": f"{row['true']:.1%}",
        }
    return pd.DataFrame(result).T.rename_axis("method")


def table_3(ran: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Text for each method: tokens before the first difference, share of texts without one, memory."""
    result = {}
    for name, own in ran.groupby("method", sort=False):
        agreed = mean_interval(own["agreed"].to_numpy(), seed=seed)
        result[name] = {
            "tokens agreed": f"{agreed.mean:.1f} [{agreed.low:.1f}, {agreed.high:.1f}]",
            "n": agreed.n,
            "nominal": f"{own['nominal'].mean():.1%}",
            "true": f"{own['true'].mean():.1%}",
        }
    return pd.DataFrame(result).T.rename_axis("method")


def _beats(other: pd.Series, mine: pd.Series) -> bool:
    return other["true"] < mine["true"] and other["added_nll"] < mine["added_nll"]


def _beaten(mine: pd.Series, table: pd.DataFrame) -> bool:
    return any(_beats(row, mine) for _, row in table.iterrows())
