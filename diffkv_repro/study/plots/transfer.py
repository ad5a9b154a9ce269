"""Figures of notebook 13: the two processes, completion times by bandwidth, stages."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import PALETTE, PAPER_COLOUR

_COLOURS = {"none": PAPER_COLOUR, "adaptive": PALETTE[1]}
_STAGES = {
    "prefill": "#BBBBBB", "encode": PALETTE[4], "communication": PALETTE[0], "decode": PALETTE[2],
    "generate": "#DDDDDD",
}  # fmt: skip

_PAPERS = {
    "none": ("uncompressed", PAPER_COLOUR), "cachegen": ("CacheGen", PALETTE[0]), "kivi": ("KIVI", PALETTE[2]),
    "mixhq": ("MixHQ", PALETTE[3]), "kvserve": ("adaptive", PALETTE[1]),
}  # fmt: skip


def colours(arms: Sequence[str]) -> dict[str, str]:
    """A colour an arm, the same in all figures of the notebook."""
    others = [arm for arm in arms if arm not in _COLOURS]
    return _COLOURS | dict(zip(others, [PALETTE[place] for place in (0, 2, 3, 4, 5, 6)], strict=False))


def architecture(boxes: Mapping[str, Sequence[str]], arrows: Sequence[tuple[str, str, str]], title: str) -> go.Figure:
    """Figure 6 from live objects: ``boxes`` by title with their lines, in rows of two; ``arrows`` from, to, text."""
    figure = go.Figure()
    places = {name: (0.06 + 0.52 * (place % 2), 0.62 - 0.56 * (place // 2)) for place, name in enumerate(boxes)}
    for place, (name, lines) in enumerate(boxes.items()):
        x, y = places[name]
        figure.add_shape(
            type="rect", x0=x, y0=y, x1=x + 0.36, y1=y + 0.36, line={"color": PALETTE[place % 4], "width": 2},
            fillcolor="#FAFAFA", layer="below",
        )  # fmt: skip
        text = "<br>".join([f"<b>{name}</b>", *lines])
        figure.add_annotation(x=x + 0.012, y=y + 0.345, text=text, showarrow=False, align="left", xanchor="left",
                              yanchor="top", font_size=12)  # fmt: skip
    for number, (start, end, text) in enumerate(arrows):
        (x0, y0), (x1, y1) = places[start], places[end]
        sideways = y0 == y1
        shift = 0.09 if number % 2 else -0.06
        tail = (x0 + (0.36 if x1 > x0 else 0.0), y0 + 0.18 + shift) if sideways else (x0 + 0.18 + shift, y0)
        head = (x1 + (0.0 if x1 > x0 else 0.36), y1 + 0.18 + shift) if sideways else (x1 + 0.18 + shift, y1 + 0.36)
        if not sideways and y1 > y0:
            tail, head = (tail[0], y0 + 0.36), (head[0], y1)
        figure.add_annotation(
            x=head[0], y=head[1], ax=tail[0], ay=tail[1], axref="x", ayref="y", showarrow=True, arrowhead=2, text="",
            arrowwidth=2, arrowcolor="#444444",
        )  # fmt: skip
        middle = ((tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2)
        figure.add_annotation(
            x=middle[0] + (0 if sideways else 0.01), y=middle[1] + (0.012 if sideways else 0), text=text, font_size=11,
            showarrow=False, xanchor="center" if sideways else "left", yanchor="bottom" if sideways else "middle",
        )  # fmt: skip
    figure.update_xaxes(range=[0, 1.02], visible=False)
    figure.update_yaxes(range=[0, 1.02], visible=False)
    figure.update_layout(title=title, height=470, margin={"l": 10, "r": 10, "t": 56, "b": 64})
    return figure


def completion(times: pd.DataFrame, chosen: Mapping[float, str], short: pd.Series, title: str) -> go.Figure:
    """Figure 12: seconds by bandwidth (rows) and arm (columns), each over the fastest static one; a short one beside.

    ``chosen`` is what the adaptive arm used by bandwidth; ``short`` milliseconds by arm.
    """
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.78, 0.22], horizontal_spacing=0.09,
        subplot_titles=["a long prompt: time over that of the best static", "a short prompt"],
    )  # fmt: skip
    colour = colours(list(times))
    best = times.drop(columns="adaptive").min(axis=1)
    names = [f"{gbps:g} Gbps<br>{chosen[gbps]}" for gbps in times.index]
    for arm in times:
        figure.add_bar(
            x=names, y=times[arm] / best, name=arm, marker_color=colour[arm], customdata=times[arm],
            hovertemplate="%{customdata:.3f} s, %{y:.2f} x the best<extra>" + arm + "</extra>", row=1, col=1,
        )  # fmt: skip
    figure.add_hline(y=1, line={"color": "#444444", "width": 1, "dash": "dash"}, row=1, col=1)
    figure.add_bar(
        x=list(short.index), y=short, marker_color=[colour[arm] for arm in short.index], showlegend=False, row=1, col=2
    )
    ticks = [1, 1.5, 2, 3, 5, 10, 20]
    figure.update_yaxes(title_text="times as long as the best", type="log", row=1, col=1, tickvals=ticks,
                        range=[math.log10(0.7), math.log10(1.15 * float(times.div(best, axis=0).max().max()))],
                        ticktext=[f"{one:g}" for one in ticks])  # fmt: skip
    figure.update_yaxes(title_text="ms", rangemode="tozero", row=1, col=2)
    figure.update_layout(
        title=title, height=600, barmode="group", margin={"t": 96, "b": 150},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
    )  # fmt: skip
    return figure


def against_bandwidth(
    closed: pd.DataFrame, predicted: pd.DataFrame, thresholds: Mapping[str, float], replay: pd.DataFrame,
    published: Mapping[str, Sequence[float]], gbps: Sequence[float],
) -> go.Figure:  # fmt: skip
    """Figure 13: measured one request at a time with equation 1, over B and B/B*, and simulated at the paper's volume.

    ``closed`` and ``predicted`` [Gbps, arm] in seconds; ``thresholds`` B* in Gbps; ``replay`` [Gbps, arm] in seconds
    next to ``published`` milliseconds.
    """
    figure = make_subplots(
        rows=1, cols=3, horizontal_spacing=0.07, column_widths=[0.36, 0.3, 0.34],
        subplot_titles=["one at a time, measured", "the same, over B/B*", "ten, one a second, simulated"],
    )  # fmt: skip
    colour = colours(list(closed))
    for arm in closed:
        mark = ("diamond-open", 11) if arm == "adaptive" else ("circle", 8)
        figure.add_scatter(
            x=closed.index, y=closed[arm], name=arm, mode="markers", legendgroup=arm, row=1, col=1,
            marker={"color": colour[arm], "symbol": mark[0], "size": mark[1]},
        )  # fmt: skip
        if arm in predicted and arm != "adaptive":
            figure.add_scatter(
                x=predicted.index, y=predicted[arm], mode="lines", legendgroup=arm, showlegend=False, row=1, col=1,
                line={"color": colour[arm], "width": 1.5}, name=f"{arm}, equation 1",
            )  # fmt: skip
    for place, (name, value) in enumerate(thresholds.items()):
        if value > 0:
            figure.add_vline(x=value, line={"color": colour[name], "width": 1, "dash": "dot"}, row=1, col=1)
            figure.add_scatter(
                x=closed.index / value, y=closed["none"] / closed[name], mode="markers+lines", legendgroup=name,
                showlegend=False, name=name, line={"color": colour[name], "width": 1}, marker_size=7, row=1, col=2,
            )  # fmt: skip
            figure.add_annotation(
                x=math.log10(value), y=1.0 - 0.05 * place, yref="y domain", text="B*", showarrow=False, xanchor="left",
                font={"color": colour[name], "size": 11}, row=1, col=1,
            )  # fmt: skip
    for arm, (name, tint) in _PAPERS.items():
        dash = "dash" if arm == "kvserve" else "solid"
        simulated = "adaptive" if arm == "kvserve" else arm
        if simulated in replay:
            figure.add_scatter(
                x=replay.index, y=replay[simulated], name=f"{name}, simulated", mode="lines", row=1, col=3,
                line={"color": tint, "width": 2, "dash": dash},
            )  # fmt: skip
        key = "default" if arm == "none" else arm
        if key in published:
            figure.add_scatter(
                x=list(gbps), y=[value / 1e3 for value in published[key]], mode="markers", row=1, col=3,
                name=f"{'KVServe' if arm == 'kvserve' else name}, published",
                marker={"symbol": "x", "size": 9, "color": tint},
            )  # fmt: skip
    for line in ({"x": 1}, {"y": 1}):
        add = figure.add_vline if "x" in line else figure.add_hline
        add(**line, line={"color": PAPER_COLOUR, "width": 1, "dash": "dash"}, row=1, col=2)
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    figure.update_xaxes(type="log", title_text="Gbps", tickvals=ticks, ticktext=[f"{one:g}" for one in ticks])
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{one:g}" for one in ticks])
    figure.update_xaxes(title_text="B / B*", row=1, col=2)
    figure.update_yaxes(title_text="seconds, without the model's", row=1, col=1)
    figure.update_yaxes(title_text="times as fast as none", row=1, col=2)
    figure.update_yaxes(title_text="seconds, model included", row=1, col=3)
    figure.update_layout(
        title="One at a time, equation 1 holds; the paper's times need a queue", height=680,
        legend={"orientation": "h", "y": -0.19, "yanchor": "top", "x": 0}, margin={"t": 96, "b": 220},
    )  # fmt: skip
    return figure


def stages(
    panels: Mapping[str, pd.DataFrame], published: Mapping[str, Mapping[str, Sequence[float]]], title: str
) -> go.Figure:
    """Figure 15: seconds by stage (columns) of each arm (rows), a panel a setting; the paper's shares at the right."""
    names = [*panels, *published]
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names, horizontal_spacing=0.07)
    for column, (name, table) in enumerate(panels.items(), start=1):
        for stage, colour in _STAGES.items():
            if stage in table:
                figure.add_bar(
                    x=list(table.index), y=table[stage], name=stage, marker_color=colour, legendgroup=stage,
                    showlegend=column == 1, row=1, col=column,
                    hovertemplate=stage + " %{y:.3f} s<extra>" + name + "</extra>",
                )  # fmt: skip
        figure.update_yaxes(title_text="seconds" if column == 1 else None, rangemode="tozero", row=1, col=column)
    for column, (_, arms) in enumerate(published.items(), start=len(panels) + 1):
        for place, colour in enumerate(_STAGES.values()):
            y = [values[place] / 1e3 for values in arms.values()]
            figure.add_bar(x=list(arms), y=y, marker_color=colour, showlegend=False, row=1, col=column)
    figure.update_xaxes(tickangle=-35)
    figure.update_layout(
        title=title, barmode="stack", height=600, margin={"t": 96, "b": 170},
        legend={"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0, "traceorder": "normal"},
    )  # fmt: skip
    return figure
