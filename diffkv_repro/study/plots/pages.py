"""The page inspector's figure: the page tables of one layer of a request, and the circular free list."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE
from diffkv_repro.study.plots.memory import request_pages

_COLUMNS, _LINES = 48, 16


def tables_and_list(
    pages: pd.DataFrame, entries: int, tiers: Sequence[str], listed: Sequence[int | None], head: int, tail: int,
    title: str,
) -> go.Figure:  # fmt: skip
    """Above the tables, as ``request_pages`` draws them; below the list as it lies in memory, line by line.

    ``listed`` is the page in each slot of the list, None where nothing is free there.
    """
    above = request_pages(pages, entries, tiers, title)
    rows = max(1, pages["head"].nunique())
    columns = max(_COLUMNS, -(-len(listed) // _LINES))
    lines, size = -(-len(listed) // columns), max(2, round(14 * _COLUMNS / columns))
    tall, short = 46 * rows + 40, 24 * lines + 30
    figure = make_subplots(
        rows=2, cols=1, row_heights=[tall, short], vertical_spacing=90 / (tall + short),
        subplot_titles=("", "circular free list, as it lies in memory, from left to right and line by line"),
    )  # fmt: skip
    for trace in above.data:
        figure.add_trace(trace, row=1, col=1)
    figure.layout.xaxis.update(above.layout.xaxis.to_plotly_json())
    figure.layout.yaxis.update(above.layout.yaxis.to_plotly_json())
    for name, colour, free in (("free page", PALETTE[2], True), ("empty slot of the list", "white", False)):
        slots = [slot for slot, page in enumerate(listed) if (page is not None) == free]
        figure.add_scatter(
            x=[slot % columns for slot in slots], y=[slot // columns for slot in slots], mode="markers", name=name,
            marker={"symbol": "square", "size": size, "color": colour, "line": {"width": 1, "color": "#AAAAAA"}},
            customdata=[[slot, listed[slot]] for slot in slots], row=2, col=1,
            hovertemplate="slot %{customdata[0]}" + (": page %{customdata[1]}" if free else "") + "<extra></extra>",
        )  # fmt: skip
    for name, slot, symbol in (("head: the next to be given", head, "circle-open"), ("tail", tail, "x-thin-open")):
        figure.add_scatter(
            x=[slot % columns], y=[slot // columns], mode="markers", name=name, row=2, col=1, hoverinfo="name",
            marker={"symbol": symbol, "size": 11, "color": "#000000", "line": {"width": 3}},
        )  # fmt: skip
    hidden = {"visible": False, "row": 2, "col": 1}
    figure.update_xaxes(range=[-0.8, columns - 0.2], **hidden)
    figure.update_yaxes(range=[lines - 0.4, -0.6], **hidden)
    figure.update_layout(
        title=title, legend=LEGEND_ABOVE | {"y": 1 + 30 / (tall + short)}, height=tall + short + 310,
        margin={"t": 150, "l": above.layout.margin.l, "b": 72},
    )  # fmt: skip
    return figure
