"""Figures of notebook 10: the space of profiles, and the pipeline that a profile is."""

import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE


def space(counts: Mapping[str, tuple[int, int | None]], points: pd.DataFrame) -> go.Figure:
    """Figure 5: how many profiles each level of detail has, ours and as plotted in the paper; and measured profiles,
    quality over ratio (columns ``profile``, ``ratio``, ``relative``, ``front``)."""
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.42, 0.58], horizontal_spacing=0.12,
        subplot_titles=("profiles to choose from", "what some of them do"),
    )  # fmt: skip
    for name, place, colour in (("ours, counted", 0, PALETTE[0]), ("as plotted in the paper", 1, PALETTE[5])):
        figure.add_bar(
            x=list(counts), y=[pair[place] for pair in counts.values()], name=name, marker_color=colour,
            text=[f"{pair[place]:,}" if pair[place] else "" for pair in counts.values()], textposition="outside",
            textfont={"size": 10}, textangle=0,
            row=1, col=1,
        )  # fmt: skip
    looks = ((False, "dominated", "#999999", "circle"), (True, "on the front", PALETTE[1], "diamond"))
    for front, name, colour, symbol in looks:
        own = points[points["front"] == front]
        figure.add_scatter(
            x=own["ratio"], y=100 * own["relative"], mode="markers", name=name, text=own["profile"],
            marker={"color": colour, "symbol": symbol, "size": 9 if front else 6},
            hovertemplate="%{text}<br>ratio %{x:.2f}, quality %{y:.1f} %<extra></extra>", row=1, col=2,
        )  # fmt: skip
    figure.add_hline(y=97, line={"color": "#444444", "dash": "dash", "width": 1}, row=1, col=2)
    figure.update_yaxes(
        title_text="profiles", type="log", dtick=1, exponentformat="power", range=[-0.2, 4.4], row=1, col=1
    )
    figure.update_xaxes(title_text="compression ratio, everything counted", row=1, col=2)
    figure.update_yaxes(title_text="FP16's perplexity over its own, %", range=[None, 101], row=1, col=2)
    figure.update_layout(
        title="More detail, more profiles; few are worth having",
        height=560,
        legend=LEGEND_ABOVE,
        margin={"t": 132, "b": 132},
    )
    return figure


def pipeline(stages: Mapping[str, Sequence[str]], sizes: Mapping[str, float], example: str) -> go.Figure:
    """Figure 7: the parts of each stage, as registered, and the bits a number that an ``example`` leaves after each."""
    figure = make_subplots(
        rows=2, cols=1, row_heights=[0.6, 0.4], vertical_spacing=0.16, subplot_titles=("", f"bits a number: {example}")
    )
    for place, ((stage, parts), colour) in enumerate(zip(stages.items(), PALETTE, strict=False)):
        figure.add_shape(
            type="rect", x0=place + 0.05, x1=place + 0.85, y0=0, y1=1, fillcolor=colour, opacity=0.15,
            line={"color": colour}, row=1, col=1,
        )  # fmt: skip
        rows = textwrap.wrap(", ".join(parts), 28, break_on_hyphens=False)
        text = f"<b>{stage}</b><br>" + "<br>".join(rows)
        figure.add_annotation(x=place + 0.45, y=0.5, text=text, showarrow=False, font={"size": 13}, row=1, col=1)
        if place:
            figure.add_annotation(
                x=place + 0.04, y=0.5, ax=place - 0.14, ay=0.5, axref="x", ayref="y", text="", showarrow=True,
                arrowhead=2, row=1, col=1,
            )  # fmt: skip
    figure.update_xaxes(visible=False, range=[0, len(stages)], row=1, col=1)
    figure.update_yaxes(visible=False, range=[-0.05, 1.05], row=1, col=1)
    figure.add_bar(
        y=list(sizes), x=list(sizes.values()), orientation="h", marker_color=PALETTE[0], showlegend=False,
        text=[f"{value:.2f}" for value in sizes.values()], textposition="outside", row=2, col=1,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    figure.update_xaxes(title_text="bits", range=[0, 1.1 * max(sizes.values())], row=2, col=1)
    figure.update_layout(
        title="A profile is a transform, a quantizer and a codec", height=620, margin={"l": 220, "t": 90}
    )
    return figure


def choices(
    aware: Mapping[str, Mapping[str, tuple[str, float]]],
    single: Mapping[str, tuple[str, float]],
    gains: Mapping[str, float],
) -> go.Figure:
    """Table 1: the highest ratio at 97 % of the quality, by workload and for one profile everywhere, of two sets.

    ``aware`` holds by set and workload a profile and its ratio, ``single`` by set the one that passes everywhere.
    """
    figure = go.Figure()
    workloads = list(gains)
    for (name, own), colour in zip(aware.items(), (PALETTE[5], PALETTE[0]), strict=False):
        found = [*(own[workload] for workload in workloads), single[name]]
        figure.add_bar(
            x=[*workloads, "all alike"], y=[ratio for _, ratio in found], name=name, marker_color=colour,
            text=[f"{ratio:.2f}" for _, ratio in found], textposition="outside",
            customdata=[which for which, _ in found],
            hovertemplate="%{x}: %{customdata}, %{y:.2f}<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_hline(y=1, line={"color": "#444444", "dash": "dash", "width": 1})
    most = max(ratio for own in aware.values() for _, ratio in own.values())
    figure.update_yaxes(title_text="highest ratio at 97 % of the quality", range=[0, 1.15 * most])
    figure.update_layout(title="Parts combined keep the quality in fewer bytes", legend=LEGEND_ABOVE, margin_t=112)
    return figure
