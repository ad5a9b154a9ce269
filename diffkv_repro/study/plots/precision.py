"""Figures of notebook 03: the worked example of Figure 1, precisions of keys and values, key bias."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.evaluation.intervals import Interval
from diffkv_repro.study.drawing import LEAST_LOSS, LEGEND_ABOVE, LOSS_AXIS, PALETTE

_ITEMS = ("payload", "scales", "scores", "positions")
_NAMES = {"payload": "codes", "scales": "scales and zero points", "scores": "scores", "positions": "positions"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")


def worked_example(cases: Mapping[str, KVBytes], paper: Mapping[str, float]) -> go.Figure:
    """Figure 1: bytes of a toy cache over those of FP16, item by item; a dash where the paper's drawing puts it."""
    figure = go.Figure()
    for colour, item in zip(PALETTE, _ITEMS, strict=False):
        shares = [100 * getattr(size, item) / size.full for size in cases.values()]
        figure.add_bar(
            x=list(cases), y=shares, name=_NAMES[item], marker_color=colour,
            hovertemplate="%{x}: %{y:.2f} %<extra>" + _NAMES[item] + "</extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=list(paper), y=list(paper.values()), mode="markers", name="paper (codes alone)",
        marker={"symbol": "line-ew", "size": 44, "line": {"width": 4, "color": "#000000"}},
        hovertemplate="paper: %{y} %<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(title_text="% of the FP16 cache", rangemode="tozero")
    figure.update_layout(
        barmode="stack", legend=LEGEND_ABOVE, margin_t=112,
        title="Mixing precisions and pruning leaves a fifth of the cache, and a little more with its metadata",
    )  # fmt: skip
    return figure


def loss_by_precision(
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]], recorded: Mapping[str, go.Figure]
) -> go.Figure:
    """Figure 8: added negative log-likelihood of each precision, one panel a model.

    ``panels`` maps a model to series (text, arm) to precision to interval; ``recorded`` adds panels of figures that
    were drawn elsewhere by this function.
    """
    titles = [*panels, *recorded]
    kinds = list(dict.fromkeys(name.split(",")[0] for series in panels.values() for name in series))
    figure = make_subplots(
        rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles
    )  # fmt: skip
    for column, series in enumerate(panels.values(), start=1):
        for name, losses in series.items():
            means, lows, highs = (
                [max(getattr(loss, which), LEAST_LOSS) for loss in losses.values()] for which in ("mean", "low", "high")
            )
            figure.add_scatter(
                x=list(losses), y=means, name=name, legendgroup=name, mode="markers",
                error_y={
                    "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
                    "array": [high - mean for high, mean in zip(highs, means, strict=True)],
                    "arrayminus": [mean - low for low, mean in zip(lows, means, strict=True)],
                },
                marker=_marker(name, kinds),
                customdata=[[loss.mean, loss.low, loss.high, loss.n] for loss in losses.values()],
                hovertemplate="%{x}: %{customdata[0]:.4f} [%{customdata[1]:.4f}, %{customdata[2]:.4f}], "
                "n %{customdata[3]}<extra>" + name + "</extra>",
                row=1, col=column,
            )  # fmt: skip
    seen = {trace.name for trace in figure.data}
    for column, other in enumerate(recorded.values(), start=len(panels) + 1):
        for trace in other.data:
            if trace.xaxis in (None, "x"):
                trace.showlegend, trace.xaxis, trace.yaxis = trace.name not in seen, None, None
                trace.marker = _marker(trace.name, kinds)
                figure.add_trace(trace, row=1, col=column)
                seen.add(trace.name)
    figure.update_yaxes(**LOSS_AXIS)
    figure.update_yaxes(title_text="added negative log-likelihood, nats a token", col=1)
    figure.update_xaxes(tickangle=-45)
    figure.update_layout(
        title="Keys need the bits: K8V4 is nearly free, K4V8 is not, K2V4 destroys the model",
        legend=LEGEND_ABOVE, margin_t=112,
    )  # fmt: skip
    return figure


def key_error_by_layer(tables: Mapping[str, pd.DataFrame], bits: int, recorded: Sequence[go.Figure]) -> go.Figure:
    """Error of keys in ``bits`` bits by layer; one line a model and arm."""
    figure = go.Figure()
    for name, table in tables.items():
        for arm, dash in (("plain", "solid"), ("bias_free", "dot")):
            if arm in table:
                label = f"{name}, {'without its bias' if arm == 'bias_free' else 'as it is'}"
                figure.add_scatter(
                    x=table["layer"], y=table[arm], name=label, mode="lines+markers", line_dash=dash,
                    hovertemplate="layer %{x}: %{y:.3f}<extra>" + label + "</extra>",
                )  # fmt: skip
    for other in recorded:
        for trace in other.data:
            figure.add_trace(trace)
    for trace, colour in zip(figure.data, PALETTE, strict=False):
        trace.update(line_color=colour, marker_color=colour)
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text=f"error of {bits}-bit keys / size of bias-free keys", type="log", dtick=1)
    figure.update_layout(
        title="The bias of the key projection costs the quantiser its range", legend=LEGEND_ABOVE, margin_t=112
    )
    return figure


def _marker(name: str, kinds: Sequence[str]) -> dict:
    """Colour by kind of text, the same in every panel; open symbols for bias-free keys."""
    kind = name.split(",")[0]
    index = kinds.index(kind) if kind in kinds else len(kinds)
    symbol = _SYMBOLS[index % len(_SYMBOLS)] + ("-open" if "bias-free" in name else "")
    return {"color": PALETTE[index % len(PALETTE)], "symbol": symbol, "size": 9}
