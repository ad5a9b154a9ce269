"""Figures of notebook 15: what a policy does to one text, two policies side by side, predicted against measured."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE, PAPER_COLOUR

# From dark to light as precision falls, so that a map reads in grey too.
TIER_COLOURS = (PALETTE[0], PALETTE[5])
PRUNED_COLOUR = "#EFEFEF"
_ITEMS = {
    "payload": "codes", "window": "window", "scales": "scales", "scores": "scores", "positions": "positions",
    "tables": "tables", "padding": "reserved",
}  # fmt: skip
_ITEM_COLOURS = (PALETTE[0], PALETTE[6], PALETTE[4], PALETTE[2], PALETTE[3], PALETTE[1], "#BBBBBB")
_DASHES = ("solid", "dash")


def policy_effect(
    tiers: np.ndarray, layers: Sequence[int], names: Sequence[str], size: KVBytes, errors: Sequence[float], title: str
) -> go.Figure:
    """Above, the tier of every token in every head (``tiers`` [layers, kv_heads, tokens], -1 for pruned); below, bytes
    item by item over FP16, and the error of the attention output in each layer."""
    figure = make_subplots(
        rows=2, cols=2, specs=[[{"colspan": 2}, None], [{}, {}]], row_heights=[0.62, 0.38], vertical_spacing=0.17,
        horizontal_spacing=0.12,
    )  # fmt: skip
    count, heads, tokens = tiers.shape
    rows = [f"{layer}.{head}" for layer in layers for head in range(heads)]
    shades = [PRUNED_COLOUR, *TIER_COLOURS[: len(names)]]
    steps = len(shades)
    scale = [[(i + side) / steps, colour] for i, colour in enumerate(shades) for side in (0, 1)]
    figure.add_heatmap(
        z=tiers.reshape(count * heads, tokens), y=rows, colorscale=scale, zmin=-1.5, zmax=steps - 1.5, showscale=False,
        hovertemplate="token %{x}, layer.head %{y}: tier %{z}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    for name, colour in zip([*names, "pruned"], [*shades[1:], PRUNED_COLOUR], strict=True):
        marker = {"symbol": "square", "size": 14, "color": colour, "line": {"width": 1, "color": "#444444"}}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, row=1, col=1)
    _add_bytes(figure, {"true": size}, row=2, col=1, legend="legend2")
    figure.add_bar(
        y=["nominal"], x=[100 * size.nominal_ratio], orientation="h", marker_color=_ITEM_COLOURS[0], showlegend=False,
        hovertemplate="codes alone: %{x:.2f} %<extra>nominal</extra>", row=2, col=1,
    )  # fmt: skip
    _add_errors(figure, {"error": layers}, {"error": errors}, row=2, col=2)
    every = max(1, round(count / 8))
    shown = [f"{layer}.0" for layer in layers[::every]]
    figure.update_yaxes(
        title_text="layer", type="category", autorange="reversed", tickvals=shown, ticktext=list(layers[::every]),
        row=1, col=1,
    )  # fmt: skip
    figure.update_xaxes(title_text="token of the prompt", range=[-0.5, tokens - 0.5], showgrid=False, row=1, col=1)
    figure.update_layout(
        title=title, height=800, barmode="stack", legend=LEGEND_ABOVE | {"y": 1.02, "traceorder": "normal"},
        legend2={"orientation": "h", "x": 0, "y": -0.13, "yanchor": "top", "traceorder": "normal"},
        margin={"t": 104, "b": 156},
    )  # fmt: skip
    return figure


def side_by_side(
    sizes: Mapping[str, KVBytes], layers: Mapping[str, Sequence[int]], errors: Mapping[str, Sequence[float]], title: str
) -> go.Figure:
    """Two ways to store one prompt: all their bytes over FP16, item by item, and the error of each layer."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.14)
    _add_bytes(figure, sizes, row=1, col=1)
    _add_errors(figure, layers, errors, row=1, col=2)
    figure.update_layout(
        title=title, height=504, barmode="stack", margin={"t": 84, "b": 196},
        legend={"orientation": "h", "y": -0.36, "yanchor": "top", "x": 0, "traceorder": "normal"},
    )  # fmt: skip
    return figure


def predicted_agreement(rows: pd.DataFrame, title: str) -> go.Figure:
    """Measured over predicted agreement, a mark a policy and text; ``rows`` has text, tiers, predicted, measured."""
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="as predicted",
                       line={"color": PAPER_COLOUR, "dash": "dash"}, hoverinfo="skip")  # fmt: skip
    symbols = ("circle", "square", "diamond", "triangle-up", "x", "cross")
    for (name, own), colour, symbol in zip(rows.groupby("tiers", sort=False), PALETTE, symbols, strict=False):
        figure.add_scatter(
            x=own["predicted"], y=own["measured"], mode="markers", name=name, customdata=own[["text", "policy"]],
            marker={"color": colour, "symbol": symbol, "size": 10, "opacity": 0.8},
            hovertemplate="%{customdata[1]}<br>%{customdata[0]}: predicted %{x:.2f}, measured %{y:.2f}<extra></extra>",
        )  # fmt: skip
    axis = {"range": [min(0.0, *rows["measured"]) - 0.03, 1.03], "tickformat": ".1f"}
    figure.update_xaxes(title_text="predicted share of tokens with the same next token", **axis)
    figure.update_yaxes(title_text="measured through the cache", **axis)
    figure.update_layout(title=title, legend=LEGEND_ABOVE, margin_t=112)
    return figure


def _add_bytes(figure: go.Figure, sizes: Mapping[str, KVBytes], *, row: int, col: int, legend: str = "legend") -> None:
    for (item, name), colour in zip(_ITEMS.items(), _ITEM_COLOURS, strict=True):
        counts = [getattr(size, item) for size in sizes.values()]
        if any(counts):
            figure.add_bar(
                y=list(sizes), x=[100 * count / size.full for count, size in zip(counts, sizes.values(), strict=True)],
                orientation="h", name=name, marker_color=colour, customdata=counts, legend=legend, row=row, col=col,
                hovertemplate="%{y}: %{customdata:,} bytes, %{x:.2f} %<extra>" + name + "</extra>",
            )  # fmt: skip
    figure.update_xaxes(title_text="% of the FP16 cache", rangemode="tozero", row=row, col=col)
    figure.update_yaxes(categoryorder="array", categoryarray=["true", "nominal", *list(sizes)[::-1]], row=row, col=col)


def _add_errors(
    figure: go.Figure, layers: Mapping[str, Sequence[int]], errors: Mapping[str, Sequence[float]], *, row: int, col: int
) -> None:
    for (name, own), colour, dash in zip(errors.items(), PALETTE, _DASHES, strict=False):
        figure.add_scatter(
            x=list(layers[name]), y=[100 * float(value) for value in own], mode="lines+markers", name=name,
            line={"color": colour, "dash": dash}, marker={"size": 5}, showlegend=len(errors) > 1, row=row, col=col,
            hovertemplate="layer %{x}: %{y:.2f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="layer", row=row, col=col)
    figure.update_yaxes(title_text="output error, %", rangemode="tozero", row=row, col=col)
