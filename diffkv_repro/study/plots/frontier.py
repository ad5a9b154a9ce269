"""Figures of notebook 05: quality against bytes, tier fractions, and tables."""

import base64
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEAST_LOSS, LEGEND_ABOVE, LOSS_AXIS, PALETTE

_TIERS = (("high", PALETTE[0]), ("low", PALETTE[5]), ("pruned", "#BBBBBB"))


def loss_against_bytes(points: pd.DataFrame, curves: Mapping[str, Sequence[str]], recorded: Mapping[str, go.Figure],
                       name: str) -> go.Figure:  # fmt: skip
    """Figure 11: added negative log-likelihood over true bytes; ``points`` has a row a method with columns ``method``,
    ``true``, ``nominal``, ``added_nll``, ``low``, ``high``. ``curves`` joins methods to a line each; the others are
    baselines, a point each."""
    titles = [name, *recorded]
    figure = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    table = points.set_index("method")
    for colour, (label, methods) in zip(PALETTE, curves.items(), strict=False):
        own = table.loc[list(methods)]
        figure.add_trace(_points(own, label, colour, "lines+markers", None), row=1, col=1)
    joined = {method for methods in curves.values() for method in methods}
    others = table[~table.index.isin(joined)]
    trace = _points(others, "baselines", "#444444", "markers+text", "hexagon")
    trace.update(text=list(others.index), textfont={"size": 10})
    figure.add_trace(trace, row=1, col=1)
    seen = {trace.name for trace in figure.data}
    for column, other in enumerate(recorded.values(), start=2):
        for trace in other.data:
            if trace.xaxis in (None, "x"):
                trace.showlegend, trace.xaxis, trace.yaxis = trace.name not in seen, None, None
                figure.add_trace(trace, row=1, col=column)
                seen.add(trace.name)
    for trace in figure.data:
        if trace.text is not None:
            others = [own for own in figure.data if own.xaxis == trace.xaxis and own is not trace]
            near = [point for own in others for point in zip(_numbers(own.x), _numbers(own.y), strict=True)]
            trace.textposition = _places(
                _numbers(trace.x), _numbers(trace.y), trace.text, width=0.65 * len(titles), near=near
            )
    figure.update_yaxes(**LOSS_AXIS)
    figure.update_yaxes(title_text="added negative log-likelihood, nats a token", col=1)
    figure.update_xaxes(title_text="% of FP16 bytes, metadata included", ticksuffix=" %")
    figure.update_layout(
        title="Quality against memory: lower left is better", height=620, legend=LEGEND_ABOVE, margin_t=136
    )
    return figure


def _numbers(values: Sequence[float] | Mapping[str, str]) -> np.ndarray:
    """Coordinates of a trace; those of a recorded figure come as plotly writes arrays, in base 64."""
    if isinstance(values, Mapping):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
    return np.asarray(values, dtype=float)


def _places(
    x: Sequence[float], y: Sequence[float], labels: Sequence[str], *, width: float,
    near: Sequence[tuple[float, float]] = (),
) -> list[str]:  # fmt: skip
    """Where each label stands beside its point: the first place that no other point or earlier label takes up.

    ``width`` of a letter in percent of bytes; a line is about a tenth of a decade high. ``near``: unlabelled points.
    """
    heights, taken, places = np.log10(y), [], [""] * len(labels)
    points = [*zip(x, heights, strict=True), *((at, np.log10(loss)) for at, loss in near)]
    taken += [(at - 0.6, at + 0.6, height - 0.03, height + 0.03) for at, height in points]
    for index in np.argsort(x):
        boxes = {}
        length = width * len(labels[index])
        for side, left in (("right", x[index] + width), ("left", x[index] - width - length)):
            for level, low in (("top", 0.02), ("bottom", -0.12), ("middle", -0.05)):
                bottom = heights[index] + low
                boxes[f"{level} {side}"] = (left, left + length, bottom, bottom + 0.1)
        inside = {name: box for name, box in boxes.items() if box[0] > 17 and box[1] < 112}
        free = [name for name, box in inside.items() if not any(_overlap(box, own) for own in taken)] or list(inside)
        places[index] = (free or ["top right"])[0]
        taken.append(boxes[places[index]])
    return places


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _points(own: pd.DataFrame, label: str, colour: str, mode: str, symbol: str | None) -> go.Scatter:
    means, lows, highs = (own[column].clip(lower=LEAST_LOSS) for column in ("added_nll", "low", "high"))
    return go.Scatter(
        x=100 * own["true"], y=means, name=label, mode=mode, line={"color": colour, "width": 1.5},
        marker={"color": colour, "size": 8, "symbol": symbol},
        error_y={"type": "data", "symmetric": False, "array": highs - means, "arrayminus": means - lows,
                 "thickness": 1, "width": 2},
        customdata=[[method, 100 * row.nominal, row.added_nll] for method, row in own.iterrows()],
        hovertemplate="%{customdata[0]}<br>true %{x:.1f} %, nominal %{customdata[1]:.1f} %<br>"
        "added %{customdata[2]:.4f} nats<extra></extra>",
    )  # fmt: skip


def tier_fractions(panels: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Figure 12: stacked shares of high, low and pruned tokens; a panel a rule, a bar a kind of text.

    Each table has the kind of text as its index and columns ``high``, ``low``, ``pruned`` in %.
    """
    figure = make_subplots(
        rows=1, cols=len(panels), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=list(panels)
    )  # fmt: skip
    for column, table in enumerate(panels.values(), start=1):
        for tier, colour in _TIERS:
            figure.add_bar(
                x=list(table.index), y=table[tier], name=tier, marker_color=colour, legendgroup=tier,
                showlegend=column == 1, row=1, col=column,
                hovertemplate="%{x}: %{y:.1f} %<extra>" + tier + "</extra>",
            )  # fmt: skip
    figure.update_yaxes(range=[0, 100])
    figure.update_yaxes(title_text="% of tokens", col=1)
    figure.update_layout(
        title="What the same thresholds keep depends little on the text, and much on how the rule is read",
        barmode="stack", legend=LEGEND_ABOVE, margin_t=112,
    )  # fmt: skip
    return figure


def table_figure(table: pd.DataFrame, title: str, *, height: int = 560) -> go.Figure:
    """A table as a figure, so that it is stored, shown and checked as all others are."""
    shown = table.reset_index()
    figure = go.Figure(
        go.Table(
            header={"values": [f"<b>{name}</b>" for name in shown.columns], "align": "left", "fill_color": "#E6EEF5"},
            cells={"values": [shown[name] for name in shown.columns], "align": "left", "height": 24},
            columnwidth=[_width(name, shown[name]) for name in shown.columns],
        )
    )
    figure.update_layout(title=title, height=height)
    return figure


def _width(name: str, cells: Iterable) -> int:
    """In letters. A header breaks between words; its letters are bold, and so wider."""
    return max(max(map(len, name.split())) + 3, *(len(str(cell)) + 3 for cell in cells))
