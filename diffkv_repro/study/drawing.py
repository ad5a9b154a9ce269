"""One look for every figure, and its files: HTML with one shared plotly.js, and PNG where a browser is found."""

import json
import logging
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from diffkv_repro.core.files import write_text
from diffkv_repro.study.grey import tell_apart

log = logging.getLogger(__name__)

# Okabe and Ito's palette: told apart with any colour vision; for grey, ``finish`` adds symbols, dashes, hatchings.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PAPER_COLOUR = "#767676"
# Right-aligned between the title and the plot, for a figure with a top margin of 92 or more.
LEGEND_ABOVE = {
    "orientation": "h",
    "x": 1,
    "xanchor": "right",
    "y": 1.08,
    "yanchor": "bottom",
}
# A logarithmic axis of losses in nats, on which those below the least, and gains, are drawn at the least.
LEAST_LOSS = 1e-3
LOSS_AXIS = {
    "type": "log",
    "tickvals": [LEAST_LOSS, 0.01, 0.1, 1, 10],
    "ticktext": [f"≤ {LEAST_LOSS:g}", "0.01", "0.1", "1", "10"],
}
SIZE = (960, 540)
_SCRIPT = "plotly.min.js"
_FOOT, _FOOT_LINE = "foot", 15  # pixels

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        colorway=PALETTE,
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": "#222222"},
        title={"font": {"size": 18}, "x": 0.02, "xanchor": "left", "y": 0.97, "yanchor": "top"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        xaxis={"showline": True, "linecolor": "#444444", "ticks": "outside", "gridcolor": "#E6E6E6", "zeroline": False},
        yaxis={"showline": True, "linecolor": "#444444", "ticks": "outside", "gridcolor": "#E6E6E6", "zeroline": False},
        margin={"l": 76, "r": 24, "t": 84, "b": 104},
        hoverlabel={"font": {"size": 13}},
    )
)


def finish(figure: go.Figure, foot: str) -> go.Figure:
    """Give ``figure`` the common look and a line at its foot that says where its numbers come from.

    Its width is left open: on a page or in a notebook it fills what there is. A figure that has such a line already
    gets another below, without what that says already. Series that only their colour tells apart get a symbol, a dash
    or a hatching too.
    """
    restyle(figure).update_layout(height=figure.layout.height or SIZE[1])
    margin = figure.layout.margin.b or TEMPLATE.layout.margin.b
    before = [own.text for own in figure.layout.annotations if own.name == _FOOT]
    if before:
        figure.layout.annotations = [own for own in figure.layout.annotations if own.name != _FOOT]
        said = "<br>".join(before).split("<br>")
        new = [line for line in foot.split("<br>") if line not in said]
        more = _FOOT_LINE * len(new)
        margin, foot = margin + more, "<br>".join([*said, *new])
        figure.update_layout(height=figure.layout.height + more)
    figure.update_layout(margin_b=margin)
    figure.add_annotation(
        text=foot, xref="paper", yref="paper", x=0, y=0, xanchor="left", yanchor="bottom",
        yshift=-margin + 4, showarrow=False, name=_FOOT, font={"size": 11, "color": "#666666"}, align="left",
    )  # fmt: skip
    return figure


def restyle(figure: go.Figure) -> go.Figure:
    """Give ``figure`` the common look, and nothing else."""
    tell_apart(figure, PALETTE)
    return figure.update_layout(template=TEMPLATE)


def as_data(figure: go.Figure) -> dict[str, Any]:
    """The figure as plain JSON data, without the template that every figure shares."""
    document = json.loads(figure.to_json(engine="json"))
    document["layout"].pop("template", None)
    return document


def ensure_script(folder: Path) -> None:
    """Put the one copy of plotly.js that all figures of ``folder`` share there, if it is not there yet."""
    script = Path(folder) / _SCRIPT
    source = get_plotlyjs()
    if not script.is_file() or script.stat().st_size != len(source.encode()):
        write_text(script, source)


def html_page(name: str, figure: go.Figure) -> bytes:
    """The figure as a page of its own that reads plotly.js from its folder."""
    page = figure.to_html(
        include_plotlyjs="directory", full_html=True, div_id=name, config={"displaylogo": False, "responsive": True}
    )
    return page.encode()


def png_image(name: str, figure: go.Figure) -> bytes | None:
    """The figure as a picture; None, with a word in the log, where no browser can draw it."""
    try:
        return figure.to_image(format="png", width=SIZE[0], height=figure.layout.height or SIZE[1], scale=2)
    except Exception as error:  # kaleido raises its own, choreographer's and asyncio's kinds
        log.warning("no PNG of %s: no browser could draw it (%s)", name, type(error).__name__)
        return None
