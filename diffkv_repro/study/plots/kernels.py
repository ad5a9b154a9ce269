"""Figures of notebook 07: what attention has to read, and how much faster it is for reading less."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE

_ITEMS = (
    ("keys", PALETTE[0]), ("values", PALETTE[5]), ("scales", PALETTE[4]), ("scores, read and written", PALETTE[3]),
)  # fmt: skip


def bytes_per_token(table: pd.DataFrame) -> go.Figure:
    """``table`` has a row a cache and a column an item: bytes that one decode step moves per token and KV head."""
    figure = go.Figure()
    for item, colour in _ITEMS:
        own = table[item]
        figure.add_bar(
            y=table.index, x=own, orientation="h", name=item, marker_color=colour,
            hovertemplate="%{y}: %{x:.0f} B of " + item + "<extra></extra>",
        )  # fmt: skip
    totals = table.sum(axis=1)
    for name, total in totals.items():
        text = f"{total:.0f} B" if name == "FP16" else f"{total:.0f} B, {totals['FP16'] / total:.2f} x less"
        figure.add_annotation(x=total, y=name, text=text, showarrow=False, xanchor="left", xshift=6)
    figure.update_layout(
        title="What one decode step moves, per token of the sequence and KV head (head size 128)",
        barmode="stack", height=440, legend=LEGEND_ABOVE, margin={"l": 250, "t": 120},
    )  # fmt: skip
    figure.update_xaxes(title_text="bytes", range=[0, 1.2 * float(totals.max())])
    figure.update_yaxes(autorange="reversed")
    return figure


def speedups(table: pd.DataFrame, ideal: Mapping[str, float], peers: str) -> go.Figure:
    """Figure 15a: ``table`` has columns ``cache``, ``batch``, ``length``, ``speedup``, ``low``, ``high``; over length,
    one panel a batch size, with the byte ratio of each cache as a dashed line."""
    batches = sorted(table["batch"].unique())
    figure = make_subplots(
        rows=1, cols=len(batches), shared_yaxes=True, horizontal_spacing=0.05,
        subplot_titles=[f"{batch} requests" for batch in batches],
    )  # fmt: skip
    names = [name for name in ideal if name in set(table["cache"])]
    for column, batch in enumerate(batches, start=1):
        for name, colour in zip(names, PALETTE, strict=False):
            own = table[(table["batch"] == batch) & (table["cache"] == name)].sort_values("length")
            figure.add_scatter(
                x=own["length"], y=own["speedup"], name=name, legendgroup=name, showlegend=column == 1,
                mode="lines+markers", line={"color": colour}, marker={"size": 8},
                error_y={"type": "data", "symmetric": False, "array": own["high"] - own["speedup"],
                         "arrayminus": own["speedup"] - own["low"], "thickness": 1},
                hovertemplate=name + ": %{y:.2f} x at %{x:,} tokens<extra></extra>", row=1, col=column,
            )  # fmt: skip
            figure.add_hline(y=ideal[name], line={"color": colour, "width": 1, "dash": "dash"}, row=1, col=column)
    figure.add_hline(y=1, line={"color": "#888888", "width": 1})
    lengths = sorted(table["length"].unique())
    ticks = {"tickvals": lengths, "ticktext": [f"{length:,}" for length in lengths]}
    figure.update_xaxes(title_text="tokens a request", type="log", **ticks)
    figure.update_yaxes(range=[0, 1.08 * max(ideal[name] for name in names)])
    figure.update_yaxes(title_text=f"times as fast as {peers}", col=1)
    figure.update_layout(
        title="Speed-up of decode attention; dashed: the byte ratio", height=560, legend=LEGEND_ABOVE, margin_t=136
    )
    return figure


def against_bars(table: pd.DataFrame, bars: Mapping[str, float]) -> go.Figure:
    """Speed-ups of the caches that have a bar, each size a point, the bar a line; ``table`` as for :func:`speedups`."""
    figure = go.Figure()
    sizes = table[["batch", "length"]].drop_duplicates().sort_values(["batch", "length"]).itertuples(index=False)
    for (batch, length), colour, symbol in zip(sizes, PALETTE, ("circle", "square", "diamond", "x"), strict=False):
        own = table[(table["batch"] == batch) & (table["length"] == length) & table["cache"].isin(list(bars))]
        figure.add_scatter(
            x=own["cache"], y=own["speedup"], mode="markers", name=f"{batch} x {length:,} tokens",
            marker={"color": colour, "size": 11, "symbol": symbol},
            hovertemplate="%{x}: %{y:.2f} x<extra>" + f"{batch} x {length:,}</extra>",
        )  # fmt: skip
    for place, bar in enumerate(bars.values()):
        figure.add_shape(
            type="line", x0=place - 0.4, x1=place + 0.4, y0=bar, y1=bar, line={"color": "#444444", "width": 2}
        )
        figure.add_annotation(
            x=place + 0.4, y=bar, text=f"bar {bar:g}", showarrow=False, xanchor="right", yanchor="bottom"
        )
    figure.update_xaxes(categoryorder="array", categoryarray=list(bars), range=[-0.6, len(bars) - 0.4])
    figure.update_yaxes(title_text="times as fast as the fastest FP16 attention", rangemode="tozero")
    figure.update_layout(
        title="Decode attention against this project's bars", height=520, legend=LEGEND_ABOVE, margin_t=124
    )
    return figure
