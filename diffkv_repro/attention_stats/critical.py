"""The fewest tokens that hold most of the attention score (DiffKV, Figures 4 and 5)."""

import numpy as np
import xarray as xr


def critical_tokens(scores: xr.DataArray, percent: float = 95.0) -> xr.DataArray:
    """Smallest number of tokens whose ``scores`` add up to ``percent`` % of the sum, along ``token``.

    Missing tokens (NaN: padding, or the last token's average) hold nothing. Where the whole sum is zero no
    token is critical: 0. Raises ValueError for a percentage outside (0, 100] and for negative scores.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent!r}; it must be above 0 and at most 100")
    if "token" not in scores.dims:
        raise ValueError(f"scores have no dimension 'token', only {', '.join(map(str, scores.dims))}")
    values = np.nan_to_num(scores.transpose(..., "token").to_numpy().astype(np.float64), nan=0.0)
    if values.min(initial=0.0) < 0:
        raise ValueError("scores must not be negative")
    held = np.cumsum(-np.sort(-values, axis=-1), axis=-1)
    total = held[..., -1:]
    # Half a rounding error of the running sum must not cost another token at 100 %.
    reached = held >= total * (percent / 100) * (1 - 4 * np.finfo(np.float64).eps * values.shape[-1])
    counts = np.where(total[..., 0] > 0, reached.argmax(axis=-1) + 1, 0)
    kept = scores.transpose(..., "token").isel(token=0, drop=True)
    return kept.copy(data=counts).rename("critical_tokens")
