"""Figures of notebook 12: thresholds, the lower envelope, the candidate set under drift, the online ablation."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import NO_COMPRESSION, Envelope, MeasuredProfile, released_choice
from diffkv_repro.kvserve.simulator import Contention, Run
from diffkv_repro.kvserve.traces import Trace
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE, PAPER_COLOUR
from diffkv_repro.study.grey import DASHES

_POINTS = 241
_STEPS = [digit * 10.0**power for power in range(-4, 7) for digit in (1, 2, 5)]
_ONE_TWO_FIVE = {"type": "log", "tickvals": _STEPS, "ticktext": [f"{value:g}" for value in _STEPS]}
_DECADES = {"type": "log", "tickvals": _STEPS[::3], "ticktext": [f"{value:g}" for value in _STEPS[::3]]}
_ARMS = {
    "full": PALETTE[0], "no bandit": PALETTE[1], "no model": PALETTE[3], "best static": PALETTE[2],
    "no compression": PAPER_COLOUR, "oracle": PALETTE[6],
}  # fmt: skip
_ARM_DASHES = {
    "full": "solid", "no bandit": "dashdot", "no model": "longdash", "best static": "dash",
    "no compression": "longdashdot", "oracle": "dot",
}  # fmt: skip


def gains(groups: Mapping[str, Sequence[MeasuredProfile]]) -> go.Figure:
    """Theorem 6.1: gain T_0 / T_p of every profile over bandwidth in units of its own threshold; a colour a group."""
    figure = go.Figure()
    x = np.geomspace(0.005, 20, _POINTS)
    pairs = list(zip(groups.items(), PALETTE, strict=False))
    for (group, profiles), colour in sorted(pairs, key=lambda pair: -len(pair[0][1])):  # few lines lie above many
        for place, profile in enumerate(profiles):
            bandwidths = x * profile.break_even
            y = [NO_COMPRESSION.seconds_per_byte(b) / profile.seconds_per_byte(b) for b in bandwidths]
            figure.add_scatter(
                x=x, y=y, name=group, legendgroup=group, showlegend=place == 0, line={"color": colour, "width": 1.5},
                customdata=bandwidths / GBPS,
                hovertemplate="%{customdata:.3g} Gbps: %{y:.2f} x<extra>" + profile.name + "</extra>",
            )  # fmt: skip
    for line in ({"x": 1}, {"y": 1}):
        add = figure.add_vline if "x" in line else figure.add_hline
        add(**line, line={"color": PAPER_COLOUR, "width": 1, "dash": "dash"})
    for text, at, side in (("compression pays", 0.9, "right"), ("it costs", 1.1, "left")):
        figure.add_annotation(
            x=np.log10(at), y=-1.05, text=text, showarrow=False, xanchor=side, font_color=PAPER_COLOUR
        )
    figure.update_xaxes(title_text="bandwidth over the profile's own threshold B*", **_ONE_TWO_FIVE)
    figure.update_yaxes(title_text="times as fast as without compression", **_ONE_TWO_FIVE)
    figure.update_layout(title="Every profile stops paying at its threshold", legend=LEGEND_ABOVE, margin_t=112)
    return figure


def envelope(panels: Mapping[str, Sequence[MeasuredProfile]], *, title: str, at: float | None = None) -> go.Figure:
    """Theorem 6.2: seconds a GB over bandwidth, above, and the released table's time over the best, below.

    A panel a set of profiles: a line a profile, the envelope behind them in grey, its breakpoints dotted; rings are
    break-even bandwidths. ``at`` marks a bandwidth, in bytes per second, and the candidates there.
    """
    figure = make_subplots(
        rows=2, cols=len(panels), row_heights=[0.72, 0.28], vertical_spacing=0.07, horizontal_spacing=0.09,
        shared_xaxes=True, subplot_titles=list(panels),
    )  # fmt: skip
    for column, (name, profiles) in enumerate(panels.items(), start=1):
        _envelope_panel(figure, name, profiles, column, at)
    figure.update_xaxes(**_DECADES)
    figure.update_xaxes(title_text="bandwidth, Gbps", row=2)
    figure.update_yaxes(title_text="seconds a GB", row=1, col=1)
    figure.update_yaxes(**_DECADES, row=1)
    figure.update_yaxes(title_text="table / best", row=2, col=1)
    lines = sum(len(profiles) + 1 for profiles in panels.values()) + 3
    figure.update_layout(
        title=title,
        height=max(780, 240 + 19 * lines + 30 * len(panels)),
        margin={"t": 96},
        legend={"tracegroupgap": 6, "font": {"size": 12}},
    )
    return figure


def _envelope_panel(
    figure: go.Figure, name: str, profiles: Sequence[MeasuredProfile], column: int, at: float | None
) -> None:
    best = Envelope(profiles)
    thresholds = [profile.break_even for profile in profiles if profile.break_even > 0]
    low = min(best.bandwidths[-1] / 4, *(threshold / 30 for threshold in thresholds))
    bandwidths = np.geomspace(low, 4 * max(thresholds), _POINTS)
    least = np.array([best.best(b).seconds_per_byte(b) for b in bandwidths])
    chosen = np.array([released_choice(profiles, b).seconds_per_byte(b) for b in bandwidths])
    panel = {"row": 1, "col": column}
    figure.add_scatter(
        x=bandwidths / GBPS, y=1e9 * least, line={"color": "#CFCFCF", "width": 9}, showlegend=column == 1,
        name="lower envelope", legendgroup="envelope", hoverinfo="skip", **panel,
    )  # fmt: skip
    near = best.candidates(at) if at else best.profiles
    for place, profile in enumerate((NO_COMPRESSION, *profiles)):
        colour = PALETTE[6] if place == 0 else PALETTE[(place - 1) % 6]
        dash = "dash" if place == 0 else DASHES[(place - 1) % len(DASHES)]  # with six colours, no two lines alike
        figure.add_scatter(
            x=bandwidths / GBPS, y=[1e9 * profile.seconds_per_byte(b) for b in bandwidths], name=profile.name,
            line={"color": colour, "width": 2.5 if profile in near else 1.2, "dash": dash}, legendgroup=str(column),
            legendgrouptitle_text=name, **panel,
            hovertemplate="%{x:.3g} Gbps: %{y:.3g} s a GB<extra>" + profile.name + "</extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=[b / GBPS for b in thresholds], y=[1e9 / b for b in thresholds], mode="markers", name="break-even",
        marker={"symbol": "circle-open", "size": 9, "color": PALETTE[6], "line": {"width": 2}}, legendgroup="envelope",
        showlegend=column == 1, hovertemplate="break-even at %{x:.3g} Gbps<extra></extra>", **panel,
    )  # fmt: skip
    for edge in best.bandwidths:
        figure.add_vline(x=edge / GBPS, line={"color": PAPER_COLOUR, "width": 1, "dash": "dot"}, **panel)
    if at:
        figure.add_vline(x=at / GBPS, line={"color": PALETTE[1], "width": 2}, **panel)
    figure.add_scatter(
        x=bandwidths / GBPS, y=chosen / least, line={"color": PALETTE[6], "width": 2, "dash": "solid"},
        name="released table", legendgroup="envelope", showlegend=column == 1, row=2, col=column,
        hovertemplate="%{x:.3g} Gbps: %{y:.3f} x the best<extra>released table</extra>",
    )  # fmt: skip


def choice(profiles: Sequence[MeasuredProfile], refused: Collection[str], chosen: str, at: float, slo: float,
           title: str) -> go.Figure:  # fmt: skip
    """Seconds a GB of every profile over bandwidth, with the choice at ``at`` bytes per second marked.

    Thick: chosen; dotted: ``refused`` for their quality. ``slo`` in seconds a GB, infinite for none.
    """
    figure = go.Figure()
    lines = (NO_COMPRESSION, *profiles)
    thresholds = [profile.break_even for profile in profiles if profile.break_even > 0]
    ends = [*Envelope(profiles).bandwidths, *thresholds, at]
    bandwidths = np.geomspace(min(ends) / 4, 4 * max(ends), _POINTS)
    best = Envelope([profile for profile in profiles if profile.name not in refused])
    figure.add_scatter(
        x=bandwidths / GBPS, y=[1e9 * best.best(b).seconds_per_byte(b) for b in bandwidths], name="lower envelope",
        line={"color": "#CFCFCF", "width": 9}, hoverinfo="skip",
    )  # fmt: skip
    for place, profile in enumerate(lines):
        colour = PALETTE[6] if place == 0 else PALETTE[(place - 1) % 6]
        dash = "dot" if profile.name in refused else "dash" if place == 0 else "solid"
        figure.add_scatter(
            x=bandwidths / GBPS, y=[1e9 * profile.seconds_per_byte(b) for b in bandwidths], name=profile.name,
            line={"color": colour, "width": 3.5 if profile.name == chosen else 1.3, "dash": dash},
            hovertemplate="%{x:.3g} Gbps: %{y:.3g} s a GB<extra>" + profile.name + "</extra>",
        )  # fmt: skip
    paying = [profile for profile in profiles if profile.break_even > 0]
    figure.add_scatter(
        x=[one.break_even / GBPS for one in paying], y=[1e9 / one.break_even for one in paying], mode="markers",
        name="break-even, B*", marker={"symbol": "circle-open", "size": 9, "color": PALETTE[6], "line": {"width": 2}},
        text=[one.name for one in paying], hovertemplate="%{text}: B* = %{x:.3g} Gbps<extra></extra>",
    )  # fmt: skip
    (own,) = (line for line in lines if line.name == chosen)
    figure.add_scatter(
        x=[at / GBPS], y=[1e9 * own.seconds_per_byte(at)], mode="markers", name="the choice",
        marker={"symbol": "star", "size": 16, "color": PALETTE[6]},
        hovertemplate="%{x:.3g} Gbps: %{y:.3g} s a GB<extra>" + chosen + "</extra>",
    )  # fmt: skip
    figure.add_vline(x=at / GBPS, line={"color": PAPER_COLOUR, "width": 1, "dash": "dot"})
    if np.isfinite(slo):
        figure.add_hline(y=slo, line={"color": PALETTE[1], "width": 2, "dash": "dash"})
        figure.add_annotation(x=1, xref="paper", y=np.log10(slo), text="SLO", showarrow=False, xanchor="right",
                              yanchor="bottom", font_color=PALETTE[1])  # fmt: skip
    figure.update_xaxes(title_text="bandwidth, Gbps", **_DECADES)
    figure.update_yaxes(title_text="seconds a GB", **_DECADES)
    figure.update_layout(title=title, height=600)
    return figure


def candidates(lines: Sequence[MeasuredProfile], drift: Mapping[str, float], drawn_edge: float, shares: pd.DataFrame,
               marked: float) -> go.Figure:  # fmt: skip
    """Figure 11: the paper's four lines with their drift, and how often the candidates hold the fastest profile.

    ``shares`` [drift, rule] in %; ``drawn_edge`` is where the paper draws its third boundary; ``marked``
    is the drift that the claim is about.
    """
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.09, column_widths=[0.52, 0.48],
        subplot_titles=["the paper's lines, without units", "our profiles, their speeds drifting"],
    )  # fmt: skip
    best = Envelope(lines, with_none=False)
    x = np.linspace(0.05, 1.0, _POINTS)
    figure.add_scatter(x=x, y=[best.best(1 / v).seconds_per_byte(1 / v) for v in x], name="lower envelope",
                       line={"color": "#CFCFCF", "width": 9}, hoverinfo="skip", row=1, col=1)  # fmt: skip
    for colour, line in zip(PALETTE, lines, strict=False):
        y = np.array([line.seconds_per_byte(1 / v) for v in x])
        figure.add_scatter(x=x, y=y, name=line.name, line={"color": colour, "width": 2, "dash": "solid"}, row=1, col=1)
        start = int(np.argmax(y > 0.56))
        figure.add_annotation(x=x[start], y=y[start], text=line.name, showarrow=False, xanchor="left",
                              yanchor="top" if start else "bottom", xshift=6, yshift=0 if start else 8,
                              font_color=colour, row=1, col=1)  # fmt: skip
        if line.name in drift:
            figure.add_scatter(x=x, y=y + drift[line.name], name=f"{line.name}, drifted", row=1, col=1,
                               line={"color": colour, "width": 1.5, "dash": "dash"})  # fmt: skip
    for place, edge in enumerate(best.edges):
        figure.add_vline(x=edge, line={"color": PAPER_COLOUR, "width": 1, "dash": "dot"}, row=1, col=1)
        figure.add_annotation(x=edge, y=0.62 + 0.07 * place, text=f"{edge:.3f}", showarrow=False, xanchor="left", row=1,
                              col=1)  # fmt: skip
    figure.add_vline(x=drawn_edge, line={"color": PALETTE[1], "width": 2}, row=1, col=1)
    figure.add_annotation(x=drawn_edge, y=0.55, text=f"drawn at {drawn_edge:.3f} ", showarrow=False, xanchor="right",
                          font_color=PALETTE[1], row=1, col=1)  # fmt: skip
    for (name, column), colour in zip(shares.items(), PALETTE[3:], strict=False):
        figure.add_scatter(
            x=[100 * d for d in column.index], y=column, name=name, mode="lines+markers", line={"color": colour},
            hovertemplate="drift of %{x:.0f} %: %{y:.1f} %<extra>" + name + "</extra>", row=1, col=2,
        )  # fmt: skip
    figure.add_vline(x=100 * marked, line={"color": PAPER_COLOUR, "width": 1, "dash": "dash"}, row=1, col=2)
    figure.add_hline(y=95, line={"color": PAPER_COLOUR, "width": 1, "dash": "dash"}, row=1, col=2)
    figure.update_xaxes(title_text="x = 1 / bandwidth", row=1, col=1)
    figure.update_yaxes(title_text="T over V", range=[0.5, 1.9], row=1, col=1)
    figure.update_xaxes(title_text="drift of codec times, % (standard deviation)", row=1, col=2)
    figure.update_yaxes(title_text="% of trials with the fastest among them", row=1, col=2)
    figure.update_layout(
        title="One neighbour a side is enough for the drift that is drawn", height=640,
        legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0}, margin={"t": 96, "b": 196},
    )  # fmt: skip
    return figure


def online(trace: Trace, edges: Sequence[float], runs: Mapping[str, Run], spells: Sequence[Contention],
           over_oracle: pd.DataFrame, published: Mapping[str, Sequence[float]], title: str) -> go.Figure:  # fmt: skip
    """Figure 16, right: bandwidth and latencies of one replay, and what every arm takes over all of them.

    ``edges``: breakpoints of the envelope, bytes per second. ``over_oracle`` has a row an arm with columns ``mean``,
    ``low``, ``high`` and ``tail``, all as multiples of the oracle's. ``published``: an arm's mean over the full one's.
    """
    figure = make_subplots(
        rows=2, cols=2, column_widths=[0.66, 0.34], row_heights=[0.3, 0.7], vertical_spacing=0.08,
        horizontal_spacing=0.1, specs=[[{}, {"rowspan": 2}], [{}, None]], shared_xaxes="columns",
        subplot_titles=["one of the replays; shaded: codecs slowed", "all replays", ""],
    )  # fmt: skip
    figure.add_scatter(x=trace.seconds, y=[b / GBPS for b in trace.bandwidths], line={"color": "#444444"},
                       showlegend=False, name="bandwidth", row=1, col=1)  # fmt: skip
    for edge in edges:
        if min(trace.bandwidths) < edge < max(trace.bandwidths):
            figure.add_hline(y=edge / GBPS, line={"color": PAPER_COLOUR, "width": 1, "dash": "dot"}, row=1, col=1)
    for arm, run in runs.items():
        smooth = pd.Series(run.seconds).rolling(5, min_periods=1).median()
        figure.add_scatter(
            x=run.arrivals, y=1e3 * smooth, name=arm, row=2, col=1,
            line={"color": _ARMS[arm], "width": 2.5 if arm == "full" else 1.5, "dash": _ARM_DASHES[arm]},
            customdata=run.profiles, hovertemplate="%{x:.0f} s: %{y:.0f} ms, %{customdata}<extra>" + arm + "</extra>",
        )  # fmt: skip
    for spell in spells:
        figure.add_vrect(x0=spell.start, x1=spell.end, fillcolor=PALETTE[4], opacity=0.15, line_width=0, row=2, col=1)
    shown = over_oracle.drop(index="oracle")
    figure.add_bar(
        x=list(shown.index), y=shown["mean"], marker_color=[_ARMS[arm] for arm in shown.index], showlegend=False,
        error_y={"type": "data", "symmetric": False, "array": shown["high"] - shown["mean"],
                 "arrayminus": shown["mean"] - shown["low"], "thickness": 1.2, "width": 4},
        hovertemplate="%{x}: mean %{y:.2f} x the oracle<extra></extra>", row=1, col=2,
    )  # fmt: skip
    figure.add_scatter(x=list(shown.index), y=shown["tail"], mode="markers", name="95th percentile",
                       marker={"symbol": "line-ew-open", "size": 22, "color": "#222222", "line": {"width": 2}},
                       row=1, col=2)  # fmt: skip
    base = over_oracle["mean"]["full"]
    figure.add_scatter(x=list(published), y=[base * value for value in published.values()], mode="markers",
                       name="paper, relative to full", marker={"symbol": "diamond-open", "size": 11,
                       "color": PAPER_COLOUR, "line": {"width": 2}}, row=1, col=2)  # fmt: skip
    figure.update_yaxes(title_text="Gbps", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="ms a request, median of five", **_ONE_TWO_FIVE, row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_yaxes(title_text="time over the oracle's", rangemode="tozero", row=1, col=2)
    names = [arm.replace(" ", "<br>") for arm in shown.index]
    figure.update_xaxes(tickvals=list(shown.index), ticktext=names, tickangle=0, tickfont_size=11, row=1, col=2)
    figure.update_layout(
        title=title, height=680, margin={"t": 104, "b": 176},
        legend={"orientation": "h", "y": -0.17, "yanchor": "top", "x": 0},
    )  # fmt: skip
    return figure
