"""Figures of notebook 04: pruning under equal shares, and calibration."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.evaluation.intervals import Interval
from diffkv_repro.study.drawing import LEAST_LOSS, LEGEND_ABOVE, LOSS_AXIS, PALETTE

_DASHES = {"dynamic": "solid", "static": "dash", "coverage": "dot"}


def loss_by_share(
    panels: Mapping[str, Mapping[str, Mapping[float, Interval]]], recorded: Mapping[str, go.Figure]
) -> go.Figure:
    """Figure 9: added negative log-likelihood over the share of pruned tokens, one panel a model.

    ``panels`` maps a model to arm to share in % to interval; an arm begins with dynamic, static or coverage.
    """
    titles = [*panels, *recorded]
    figure = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    for column, arms in enumerate(panels.values(), start=1):
        for index, (arm, losses) in enumerate(arms.items()):
            figure.add_trace(
                _line(list(losses), list(losses.values()), arm, PALETTE[index % len(PALETTE)], log=True),
                row=1, col=column,
            )  # fmt: skip
            figure.data[-1].line.dash = _DASHES[arm.split(",")[0]]
    _add_recorded(figure, recorded, len(panels) + 1)
    figure.update_yaxes(**LOSS_AXIS)
    figure.update_yaxes(title_text="added negative log-likelihood, nats a token", col=1)
    figure.update_xaxes(title_text="% of the prompt pruned", ticksuffix=" %")
    figure.update_layout(
        title="An equal budget per head is hard to beat, and alpha/i drops the first token",
        legend=LEGEND_ABOVE, margin_t=132,
    )  # fmt: skip
    return figure


def calibration(
    high: Mapping[str, Mapping[float, Interval]], low: Mapping[str, Mapping[float, Interval]], tolerance: float,
    recorded: Mapping[str, go.Figure],
) -> go.Figure:  # fmt: skip
    """Figure 10: added negative log-likelihood over alpha_high (nothing pruned) and over alpha_low."""
    titles = ["nothing pruned", "at the chosen alpha_high", *recorded]
    figure = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    colours = {arm: PALETTE[index % len(PALETTE)] for index, arm in enumerate([*high, *(set(low) - set(high))])}
    for column, sweeps in enumerate((high, low), start=1):
        for arm, losses in sweeps.items():
            trace = _line(list(losses), list(losses.values()), arm, colours[arm], log=True)
            trace.showlegend = column == 1 or arm not in high
            figure.add_trace(trace, row=1, col=column)
    _add_recorded(figure, recorded, 3)
    figure.add_hline(y=tolerance, line_dash="dash", line_color="#767676")
    for column, threshold in enumerate(["alpha_high", "alpha_low", *["alpha_high"] * len(recorded)], start=1):
        figure.update_xaxes(title_text=threshold, col=column)
    for note in figure.layout.annotations:
        note.font.size = 13  # three or more panels share the width
    figure.update_yaxes(**LOSS_AXIS)
    figure.update_yaxes(title_text="added negative log-likelihood, nats a token", col=1)
    figure.update_layout(
        title="Both thresholds are forgiving over N; over i they cost the first token; with a key bias, keys fail",
        legend=LEGEND_ABOVE, margin_t=112,
    )  # fmt: skip
    return figure


def _line(x: Sequence[float], losses: Sequence[Interval], name: str, colour: str, *, log: bool) -> go.Scatter:
    floor = LEAST_LOSS if log else float("-inf")
    means = [max(loss.mean, floor) for loss in losses]
    return go.Scatter(
        x=x, y=means, name=name, legendgroup=name, mode="lines+markers",
        line={"color": colour, "width": 1.5}, marker={"color": colour, "size": 7},
        error_y={
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [max(loss.high, floor) - mean for loss, mean in zip(losses, means, strict=True)],
            "arrayminus": [mean - max(loss.low, floor) for loss, mean in zip(losses, means, strict=True)],
        },
        customdata=[[loss.mean, loss.low, loss.high, loss.n] for loss in losses],
        hovertemplate="%{x}: %{customdata[0]:.4f} [%{customdata[1]:.4f}, %{customdata[2]:.4f}], n %{customdata[3]}"
        "<extra>" + name + "</extra>",
    )  # fmt: skip


def _add_recorded(figure: go.Figure, recorded: Mapping[str, go.Figure], first: int) -> None:
    """The first panel of figures drawn elsewhere, each as a panel of its own."""
    seen = {trace.name for trace in figure.data}
    for column, other in enumerate(recorded.values(), start=first):
        for trace in other.data:
            if trace.xaxis in (None, "x"):
                trace.showlegend, trace.xaxis, trace.yaxis = trace.name not in seen, None, None
                figure.add_trace(trace, row=1, col=column)
                seen.add(trace.name)
