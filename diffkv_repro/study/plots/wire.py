"""Figure of notebook 16: DiffKV's token tiers beside the published profiles, by ratio, quality and speed."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE

# Name of a kind: colour, symbol, whether its points are joined.
_KINDS = {
    "published profiles": ("#767676", "circle", False),
    "token tiers": (PALETTE[0], "square", True),
    "token tiers, ANS": (PALETTE[4], "triangle-up", True),
    "token tiers, Zstandard": (PALETTE[2], "diamond", True),
    "pages as they are": (PALETTE[1], "star", False),
}
_TICKS = [digit * 10**power for power in range(-1, 6) for digit in (1, 2, 5)]
_LEAST = 0.001  # nats a token: less, or none at all, is drawn there
_LOSSES = {_LEAST: f"≤ {_LEAST}"} | {loss: str(loss) for loss in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)}


def wire(quality: pd.DataFrame, speed: pd.DataFrame, marked: float) -> go.Figure:
    """Left: nats a token that are lost, over the ratio (columns ``kind``, ``label``, ``hover``, ``ratio``, ``lost``,
    ``where``); right: raw MB a second, encoding and decoding together (the same, and ``speed``).

    ``where`` is plotly's position of a label; ``marked`` the loss that counts as none.
    """
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.58, 0.42], horizontal_spacing=0.1,
        subplot_titles=("what the model loses", "how quickly it is sent and received"),
    )  # fmt: skip
    for column, points, value in ((1, quality, "lost"), (2, speed, "speed")):
        for kind, (colour, symbol, joined) in _KINDS.items():
            own = points[points["kind"] == kind]
            if own.empty:
                continue
            shown = own[value].clip(lower=_LEAST) if value == "lost" else own[value]
            figure.add_scatter(
                x=own["ratio"], y=shown, customdata=own[value], name=kind, legendgroup=kind, text=own["label"],
                hovertext=own["hover"],
                mode="lines+markers+text" if joined and column == 1 else "markers+text",
                textposition=own["where"], textfont={"size": 10, "color": colour}, line={"width": 1, "color": colour},
                marker={"color": colour, "symbol": symbol, "size": 13 if symbol == "star" else 9},
                hovertemplate="%{hovertext}<br>ratio %{x:.2f}, %{customdata:.3g}<extra>" + kind + "</extra>",
                showlegend=column == (1 if (quality["kind"] == kind).any() else 2), row=1, col=column,
            )  # fmt: skip
        widest = 1.12 * points["ratio"].max()
        figure.update_xaxes(title_text="compression ratio, everything counted", range=[0.8, widest], row=1, col=column)
    figure.add_hline(y=marked, line={"color": "#444444", "dash": "dash", "width": 1}, row=1, col=1)
    figure.update_yaxes(
        title_text="added loss, nats a token (log)", type="log", tickvals=list(_LOSSES),
        ticktext=list(_LOSSES.values()), row=1, col=1,
    )  # fmt: skip
    figure.update_yaxes(title_text="raw KV, MB/s there and back (log)", type="log", tickvals=_TICKS, row=1, col=2)
    figure.update_layout(
        title="DiffKV's pages on the wire: quick as they are, small with a codec", height=660, legend=LEGEND_ABOVE,
        margin_t=128,
    )  # fmt: skip
    return figure
