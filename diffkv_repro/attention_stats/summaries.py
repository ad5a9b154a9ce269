"""Numbers that summarise statistics of many windows: spans, shares, and what uniform attention would give."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from diffkv_repro.attention_stats.collect import AttentionStats
from diffkv_repro.attention_stats.critical import critical_tokens


def decades(values: xr.DataArray | np.ndarray, keep: float = 100.0) -> float:
    """Orders of magnitude between the smallest and the largest positive value.

    ``keep`` < 100 leaves out the outer values and spans the central ``keep`` % of them. NaN and zeros (a score
    that underflowed) are left out. Raises ValueError where fewer than two values are left.
    """
    if not 0 < keep <= 100:
        raise ValueError(f"keep is {keep}; it must be above 0 and at most 100")
    flat = np.asarray(values, dtype=np.float64).ravel()
    flat = flat[np.isfinite(flat) & (flat > 0)]
    if flat.size < 2:
        raise ValueError(f"{flat.size} positive values have no span")
    low, high = np.percentile(flat, [50 - keep / 2, 50 + keep / 2])
    return float(np.log10(high / low))


def top_share(scores: xr.DataArray, percent: float = 5.0) -> xr.DataArray:
    """Share of the whole score that the ``percent`` % most attended tokens hold, along ``token``."""
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent}; it must be above 0 and at most 100")
    ordered = -np.sort(-np.nan_to_num(scores.transpose(..., "token").to_numpy().astype(np.float64)), axis=-1)
    count = max(1, round(ordered.shape[-1] * percent / 100))
    share = ordered[..., :count].sum(axis=-1) / ordered.sum(axis=-1)
    return scores.transpose(..., "token").isel(token=0, drop=True).copy(data=share).rename("top_share")


def uniform_received(tokens: int) -> xr.DataArray:
    """Score each token would receive from later queries if every query spread its attention evenly.

    Even that favours early tokens, which more queries can see: the yardstick for what is uneven.
    """
    given = 1.0 / np.arange(1, tokens + 1)
    received = np.concatenate([np.cumsum(given[::-1])[::-1][1:], [0.0]])
    return xr.DataArray(received, dims="token", name="received")


def critical_table(surveyed: Sequence[AttentionStats], percent: float = 95.0) -> pd.DataFrame:
    """Critical tokens of every window, layer and KV head, by both readings of "total attention score".

    Each entry of ``surveyed`` is one window, as :func:`survey` yields them; a batch of several is refused.

    Columns: ``window``, ``layer``, ``kv_head``, ``by_sum`` (scores summed over later queries), ``by_average``
    (each token's sum divided by the number of its later queries).
    """
    frames = []
    for window, stats in enumerate(surveyed):
        if stats.received.sizes["sequence"] != 1:
            raise ValueError(f"window {window} holds {stats.received.sizes['sequence']} sequences; it must be one")
        counts = xr.Dataset(
            {
                "by_sum": critical_tokens(stats.per_kv_head(stats.received), percent),
                "by_average": critical_tokens(stats.significance, percent),
            }
        )
        frames.append(counts.isel(sequence=0).to_dataframe().reset_index().assign(window=window))
    return pd.concat(frames, ignore_index=True)[["window", "layer", "kv_head", "by_sum", "by_average"]]


def spread(table: pd.DataFrame, column: str, by: Sequence[str]) -> pd.DataFrame:
    """Mean of ``column`` per group of ``by`` and its standard deviation over windows.

    The heads of a group are averaged within each window first, so the deviation is that between requests.
    """
    if table["window"].nunique() < 2:
        raise ValueError("one window has no deviation between requests; at least 2 are needed")
    per_window = table.groupby([*by, "window"])[column].mean()
    return per_window.groupby(list(by)).agg(mean="mean", std="std").reset_index()
