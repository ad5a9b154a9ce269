"""Figure of notebook 14: time to first token with a prefix store, and what it is compared with."""

import math
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import PALETTE, PAPER_COLOUR
from diffkv_repro.study.plots.transfer import colours

_TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
_LOG = {"type": "log", "tickvals": _TICKS, "ticktext": [f"{value:g}" for value in _TICKS]}


def time_to_first_token(
    loads: pd.DataFrame, adaptive: pd.DataFrame, forms: pd.DataFrame, targets: Mapping[float, float], recompute: float,
    over_recompute: pd.Series, over_load: pd.Series,
) -> go.Figure:  # fmt: skip
    """Figure 14: seconds by Gbps of each stored form and of the controller, with its targets; speed-ups, right.

    ``loads`` [Gbps, form]; ``adaptive`` and ``forms`` [Gbps, target]; ``targets`` seconds by target.
    """
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.64, 0.36], horizontal_spacing=0.1,
        subplot_titles=["time until the cache is there", "speed-up of the controller, first target"],
    )  # fmt: skip
    tint = colours(list(loads))
    for form in loads:
        figure.add_scatter(x=loads.index, y=loads[form], name=form, mode="lines+markers", row=1, col=1,
                           line={"color": tint[form], "width": 1.5}, marker_size=5)  # fmt: skip
    symbols = ("diamond-open", "square-open", "x-thin-open")
    for (target, seconds), symbol in zip(targets.items(), symbols, strict=False):
        figure.add_scatter(
            x=adaptive.index, y=adaptive[target], name=f"adaptive, target {seconds:.2g} s", mode="markers",
            marker={"symbol": symbol, "size": 12, "color": PALETTE[1], "line": {"width": 2}}, customdata=forms[target],
            hovertemplate="%{x:g} Gbps: %{y:.3f} s, %{customdata}<extra></extra>", row=1, col=1,
        )  # fmt: skip
        if seconds > float(loads.min().min()) / 4:
            figure.add_hline(y=seconds, line={"color": PALETTE[1], "width": 1, "dash": "dash"}, row=1, col=1)
    figure.add_hline(y=recompute, line={"color": PAPER_COLOUR, "width": 3}, row=1, col=1)
    figure.add_annotation(x=1, xref="x domain", y=math.log10(recompute), text="recomputing", showarrow=False, yshift=10,
                          xanchor="right", font_color=PAPER_COLOUR, row=1, col=1)  # fmt: skip
    figure.add_scatter(x=over_recompute.index, y=over_recompute, name="over recomputing", mode="lines+markers", row=1,
                       col=2, line={"color": "#222222", "dash": "dot"})  # fmt: skip
    figure.add_scatter(x=over_load.index, y=over_load, name="over an uncompressed load", mode="lines+markers", row=1,
                       col=2, line={"color": "#222222"})  # fmt: skip
    figure.update_xaxes(title_text="Gbps", **_LOG)
    figure.update_yaxes(**_LOG)
    figure.update_yaxes(title_text="seconds", row=1, col=1)
    figure.update_yaxes(title_text="times as fast", row=1, col=2)
    figure.update_layout(
        title="Compression widens the range of links over which loading a prefix pays", height=640,
        legend={"orientation": "h", "y": -0.19, "yanchor": "top", "x": 0}, margin={"t": 96, "b": 200},
    )  # fmt: skip
    return figure
