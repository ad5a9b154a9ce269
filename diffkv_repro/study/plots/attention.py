"""DiffKV Figures 2 to 5: how unevenly attention falls on tokens, layers, heads and requests."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from diffkv_repro.attention_stats import decades
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE, PAPER_COLOUR

_BINS_PER_DECADE = 8


def scores_against_norms(scores: Mapping[int, np.ndarray], norms: Mapping[int, np.ndarray]) -> go.Figure:
    """Figure 2: per layer, the distribution of mean scores and of value norms, each over its own median.

    ``scores`` and ``norms`` map a layer to all its values. Dividing by the median puts both on one axis,
    where width is the number of orders of magnitude that a quantity spans.
    """
    layers = list(scores)
    figure = make_subplots(
        rows=1,
        cols=len(layers),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"layer {layer}" for layer in layers],
    )
    series = (("mean attention score", scores, PALETTE[0]), ("L2 norm of the value vector", norms, PALETTE[1]))
    edges: list[float] = []
    for column, layer in enumerate(layers, start=1):
        for row, (name, values, colour) in enumerate(series):
            x, y = _log_histogram(values[layer])
            edges += [x.min(), x.max()]
            figure.add_bar(
                x=x,
                y=y,
                width=1 / _BINS_PER_DECADE,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                marker={"color": colour, "opacity": 0.6, "line": {"width": 0}},
                customdata=10**x,
                hovertemplate="%{customdata:.2g} x median: %{y:.2%} of tokens<extra>" + name + "</extra>",
                row=1,
                col=column,
            )
            figure.add_annotation(
                text=f"{decades(values[layer]):.1f} decades",
                font={"color": colour},
                showarrow=False,
                xref="x domain",
                yref="y domain",
                x=0.03,
                y=0.99 - 0.07 * row,
                xanchor="left",
                row=1,
                col=column,
            )
    # Bars have no width on a logarithmic axis, so the axis is linear in the logarithm and labelled in powers.
    powers = np.arange(np.floor(min(edges)), np.ceil(max(edges)) + 1)
    labels = [f"10<sup>{power:.0f}</sup>" if power % 2 == 0 else "" for power in powers]
    figure.update_xaxes(
        tickvals=powers, ticktext=labels, range=[powers[0], powers[-1]], title_text="value / median of its layer"
    )
    figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    figure.update_yaxes(title_text="fraction of tokens", col=1)
    figure.update_layout(
        title="Attention scores differ by orders of magnitude more than value norms",
        barmode="overlay",
        legend=LEGEND_ABOVE,
        margin_t=112,
    )
    return figure


def _log_histogram(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middles of the bins that hold something, as log10 of the value over its median, and their fractions."""
    flat = values[np.isfinite(values) & (values > 0)]
    logs = np.log10(flat / np.median(flat))
    low, high = np.floor(logs.min()), np.ceil(logs.max())
    counts, edges = np.histogram(logs, bins=max(1, int((high - low) * _BINS_PER_DECADE)), range=(low, high))
    filled = counts > 0
    return ((edges[:-1] + edges[1:]) / 2)[filled], (counts / counts.sum())[filled]


def scores_along_sequence(
    significance: xr.DataArray, uniform: xr.DataArray, words: Sequence[str], layer: int
) -> go.Figure:
    """Figure 3: mean score of every token of one sequence, one trace a KV head.

    ``significance`` (kv_head, token); ``uniform`` (token) is what evenly spread attention would give.
    """
    figure = go.Figure()
    positions = np.arange(significance.sizes["token"])
    for head in range(significance.sizes["kv_head"]):
        figure.add_scatter(
            x=positions, y=significance.isel(kv_head=head).to_numpy(), mode="markers", name=f"KV head {head}",
            marker={"size": 5, "color": PALETTE[head % len(PALETTE)], "opacity": 0.7}, text=list(words),
            hovertemplate="position %{x}, %{text}<br>mean score %{y:.2e}<extra>KV head " + str(head) + "</extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=positions, y=uniform.to_numpy(), mode="lines", name="evenly spread attention",
        line={"color": PAPER_COLOUR, "dash": "dash", "width": 2}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(title_text="position of the token in the sequence")
    figure.update_yaxes(title_text="mean score from later queries", type="log", dtick=1, exponentformat="power")
    figure.update_layout(
        title=f"A few tokens get most of the attention (layer {layer}, one sequence)",
        legend=LEGEND_ABOVE,
        margin_t=92,
    )
    return figure


def critical_by_layer(series: Mapping[str, tuple[pd.DataFrame, int]], percent: float) -> go.Figure:
    """Figure 4: mean number of critical tokens per layer, bars are the standard deviation over requests.

    ``series`` maps a name to a table with columns ``layer``, ``mean``, ``std`` and the number that evenly
    spread attention would give by the same reading, drawn dashed in the same colour.
    """
    figure = go.Figure()
    for index, (name, (table, even)) in enumerate(series.items()):
        colour = PALETTE[index]
        figure.add_scatter(
            x=table["layer"],
            y=table["mean"],
            name=name,
            mode="lines+markers",
            error_y={"type": "data", "array": table["std"], "thickness": 1.2, "width": 3},
            marker={"color": colour, "symbol": ("circle", "diamond")[index % 2], "size": 7},
            line={"color": colour, "width": 1},
            hovertemplate="layer %{x}: %{y:.0f} ± %{error_y.array:.0f} tokens<extra>" + name + "</extra>",
        )
        figure.add_scatter(
            x=[table["layer"].min(), table["layer"].max()],
            y=[even, even],
            mode="lines",
            name=f"{name}, if spread evenly",
            line={"color": colour, "dash": ("dash", "dot")[index % 2], "width": 1.5},
            hoverinfo="skip",
        )
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text=f"tokens that hold {percent:g} % of the score", rangemode="tozero")
    figure.update_layout(
        title="Layers need different numbers of tokens",
        legend=LEGEND_ABOVE,
        margin_t=92,
    )
    return figure


def critical_by_head(table: pd.DataFrame, layers: Sequence[int], percent: float) -> go.Figure:
    """Figure 5: mean number of critical tokens per KV head of some layers, bars are the deviation over requests.

    ``table`` has columns ``layer``, ``kv_head``, ``mean``, ``std``.
    """
    figure = make_subplots(
        rows=1, cols=len(layers), shared_yaxes=True, horizontal_spacing=0.04,
        subplot_titles=[f"layer {layer}" for layer in layers],
    )  # fmt: skip
    for column, layer in enumerate(layers, start=1):
        own = table[table["layer"] == layer]
        figure.add_bar(
            y=own["kv_head"], x=own["mean"], orientation="h", showlegend=False, row=1, col=column,
            error_x={"type": "data", "array": own["std"], "thickness": 1.5, "width": 5},
            marker={"color": PALETTE[0], "opacity": 0.75},
            hovertemplate="KV head %{y}: %{x:.0f} ± %{error_x.array:.0f} tokens<extra></extra>",
        )  # fmt: skip
    top = float((table["mean"] + table["std"].fillna(0)).loc[table["layer"].isin(layers)].max()) * 1.05
    figure.update_xaxes(range=[0, top])
    figure.update_xaxes(title_text=f"tokens that hold {percent:g} % of the score", col=(len(layers) + 1) // 2)
    figure.update_yaxes(title_text="KV head", dtick=1, col=1)
    figure.update_layout(margin_t=92, title="KV heads of one layer differ too, and so do requests")
    return figure
