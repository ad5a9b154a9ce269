"""Figures of notebook 06: the worked example of Figure 6, the size of a page, a request's pages, Figure 13."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.diffkv.bench_memory import MemoryTiming
from diffkv_repro.diffkv.bench_summary import best
from diffkv_repro.diffkv.memory_example import HEADS, Snapshot
from diffkv_repro.models.step_cost import StepCost
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE

_GREY = "#767676"
_FILLS = {
    "free": PALETTE[2], "allocated": PALETTE[5], "kept, high tier": PALETTE[0], "kept, low tier": PALETTE[1],
    "to give back": "#BBBBBB", "empty": "white",
}  # fmt: skip
_DARK = ("free", "kept, high tier", "kept, low tier")  # their numbers are white


def worked_example(steps: Sequence[Snapshot]) -> go.Figure:
    """Figure 6: the circular free list and the page tables of both heads, before, allocated, planned, compacted."""
    before, allocated, compacted = steps
    back = ", ".join(map(str, compacted.free))
    panels = [
        ("1. Before", before, False), ("2. Four pages a head", allocated, False), ("3. Planned", allocated, True),
        (f"4. {back} go back", compacted, True),
    ]  # fmt: skip
    figure = make_subplots(
        rows=2, cols=4, row_heights=[0.66, 0.34], vertical_spacing=0.06, horizontal_spacing=0.03,
        subplot_titles=[title for title, *_ in panels],
    )  # fmt: skip
    for column, (_, shot, planned) in enumerate(panels, start=1):
        _draw_list(figure, shot, column)
        _draw_tables(figure, shot, compacted if planned else None, column)
    for name, fill in _FILLS.items():
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=name, marker=_square(fill, 14, "#444444"), row=2, col=1
        )  # fmt: skip
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.update_yaxes(
        visible=True, showline=False, showgrid=False, ticks="", tickvals=[1, 0],
        ticktext=[f"KV head {name}" for name in HEADS], row=2, col=1,
    )  # fmt: skip
    captions = {
        "<b>circular free list</b>": 1,
        "<b>page tables</b>: high pages from the left, low pages from the right": 0.31,
    }
    for text, y in captions.items():
        figure.add_annotation(
            text=text, xref="paper", yref="paper", x=-0.08, y=y, xanchor="left", yanchor="bottom", showarrow=False,
            font={"size": 13},
        )  # fmt: skip
    figure.update_layout(
        title="Each head keeps what it needs; the middle of its pages goes back, and the end of the list wraps round",
        legend=LEGEND_ABOVE, margin={"t": 132, "b": 64, "l": 96}, height=580,
    )  # fmt: skip
    return figure


def _draw_list(figure: go.Figure, shot: Snapshot, column: int) -> None:
    count = len(shot.slots)
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    names = ["empty" if page is None else "free" for page in shot.slots]
    figure.add_scatter(
        x=np.cos(angle), y=np.sin(angle), mode="markers+text", showlegend=False,
        marker={"color": [_FILLS[name] for name in names], "size": 23, "line": {"width": 1, "color": "#AAAAAA"}},
        text=["" if page is None else str(page) for page in shot.slots], textfont={"color": "white", "size": 13},
        customdata=list(range(count)), hovertemplate="slot %{customdata} of the list: page %{text}<extra></extra>",
        row=1, col=column,
    )  # fmt: skip
    ends = {shot.head: "head", shot.tail: "tail"} if shot.head != shot.tail else {shot.head: "head = tail"}
    for slot, name in ends.items():
        x, y = np.cos(angle[slot]), np.sin(angle[slot])
        figure.add_annotation(
            x=1.22 * x, y=1.22 * y, ax=1.66 * x, ay=1.66 * y, axref=f"x{column}", ayref=f"y{column}",
            text=f"<b>{name}</b>", showarrow=True, arrowhead=2, arrowcolor="#444444", font={"size": 13},
            xanchor=_side(x), row=1, col=column,
        )  # fmt: skip
    figure.add_annotation(
        x=0, y=0, text=f"{len(shot.free)} of {count}<br>free", showarrow=False, font={"size": 13},
        row=1, col=column,
    )  # fmt: skip
    figure.update_xaxes(range=[-1.9, 1.9], row=1, col=column)
    figure.update_yaxes(range=[-1.5, 1.9], scaleanchor=f"x{column}", row=1, col=column)


def _side(x: float) -> str:
    """Which end of a label is at its arrow, for one that lies left, above or below, or right of the list."""
    return "left" if x > 0.8 else "right" if x < -0.8 else "center"


def _draw_tables(figure: go.Figure, shot: Snapshot, plan: Snapshot | None, column: int) -> None:
    x, y, names, pages = [], [], [], []
    for row, table in enumerate(shot.tables):
        for entry, page in enumerate(table):
            x.append(entry)
            y.append(1 - row)
            pages.append(page)
            names.append(_state(page, plan, row))
    figure.add_scatter(
        x=x, y=y, mode="markers+text", showlegend=False,
        marker=_square([_FILLS[name] for name in names], 26, "#AAAAAA"),
        text=["" if page < 0 else str(page) for page in pages],
        textfont={"color": ["white" if name in _DARK else "#222222" for name in names], "size": 13},
        customdata=names, hovertemplate="entry %{x}: page %{text}, %{customdata}<extra></extra>", row=2, col=column,
    )  # fmt: skip
    figure.update_xaxes(range=[-0.6, len(shot.tables[0]) - 0.4], row=2, col=column)
    figure.update_yaxes(range=[-0.7, 1.7], row=2, col=column)


def _state(page: int, plan: Snapshot | None, row: int) -> str:
    if page < 0:
        return "empty"
    if plan is None:
        return "allocated"
    kept = plan.tables[row]
    if page not in kept:
        return "to give back"
    return "kept, high tier" if page in kept[: kept.index(-1)] else "kept, low tier"


def _square(fill: str | list[str], size: int, line: str) -> dict:
    return {"symbol": "square", "color": fill, "size": size, "line": {"width": 1, "color": line}}


def slack_by_page_size(curve: pd.DataFrame, chosen: int) -> go.Figure:
    """The search for a page size: percent of a page that holds nothing, by size, for each precision and the worst."""
    figure = go.Figure()
    for colour, name in zip(PALETTE, curve.columns.drop("worst"), strict=False):
        figure.add_scatter(
            x=curve.index, y=curve[name], name=name, mode="markers", marker={"color": colour, "size": 6},
            hovertemplate="%{x} bytes: %{y:.2f} %<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.add_scatter(x=curve.index, y=curve["worst"], name="worst of them", line={"color": "#000000", "width": 1.5})
    figure.add_scatter(
        x=[chosen], y=[curve["worst"][chosen]], name=f"{chosen:,} bytes", mode="markers",
        marker={"symbol": "star", "size": 18, "color": PALETTE[4], "line": {"width": 1, "color": "#000000"}},
    )  # fmt: skip
    figure.update_xaxes(title_text="bytes of a page")
    figure.update_yaxes(title_text="% of a page that holds nothing", rangemode="tozero")
    figure.update_layout(
        title=f"A page of {chosen:,} bytes wastes at most {curve['worst'][chosen]:.1f} %",
        legend=LEGEND_ABOVE, margin_t=112,
    )  # fmt: skip
    return figure


def request_pages(pages: pd.DataFrame, entries: int, tiers: Sequence[str], title: str) -> go.Figure:
    """Table entries of one layer of a request, a row a head: page ids by tier, paler where a page is partly filled.

    ``pages`` as ``inspect_pages`` gives them; ``entries`` of a table; ``tiers`` are names of the tiers.
    """
    several = len(tiers) > 2
    pages = pages.assign(row=[
        f"KV head {page.head}" + (f", table {page.table}" if several else "") for page in pages.itertuples()
    ])  # fmt: skip
    rows = list(dict.fromkeys(pages["row"]))
    figure = go.Figure()
    figure.add_scatter(
        x=[entry for _ in rows for entry in range(entries)], y=[row for row in rows for _ in range(entries)],
        mode="markers", name="no page", marker=_square("white", 30, "#CCCCCC"), hoverinfo="skip",
    )  # fmt: skip
    for tier, (name, colour) in enumerate(zip(tiers, PALETTE, strict=False)):
        own = pages[pages["tier"] == tier]
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=_square(colour, 30, colour))
        full = own["fill"] >= 60
        figure.add_scatter(
            x=own["entry"], y=own["row"], mode="markers+text", showlegend=False, text=own["page"].astype(str),
            marker=_square(colour, 30, colour) | {"opacity": list(0.15 + 0.85 * own["fill"] / 100)},
            textfont={"size": 11, "color": np.where(full, "white", "#222222").tolist()},
            customdata=own[["tokens", "capacity"]],
            hovertemplate="page %{text}: %{customdata[0]} of %{customdata[1]} tokens<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="entry of the page table", range=[-0.6, entries - 0.4], dtick=1, showgrid=False)
    figure.update_yaxes(
        categoryorder="array", categoryarray=rows[::-1], range=[-0.6, len(rows) - 0.4], showgrid=False
    )  # fmt: skip
    figure.update_layout(
        title=title, legend=LEGEND_ABOVE, height=220 + 46 * len(rows), margin={"t": 112, "l": 160 if several else 100}
    )
    return figure


def management(
    timings: Sequence[MemoryTiming], costs: Sequence[StepCost], *, title: str, where: str,
    recorded: Mapping[str, go.Figure],
) -> go.Figure:  # fmt: skip
    """Figure 13: latency of the memory managers, and of executing the model, by batch; a panel a phase.

    ``where`` says what the panels below were measured on; ``recorded`` adds, above them, those of figures that were
    drawn elsewhere by this function, under their labels.
    """
    phases = ("prompt", "generation")
    names = [*recorded, where]
    figure = make_subplots(
        rows=len(names), cols=2, shared_yaxes="rows", horizontal_spacing=0.04, vertical_spacing=0.3 / len(names),
        subplot_titles=[f"{phase}: {name}" for name in names for phase in phases],
    )  # fmt: skip
    for row, other in enumerate(recorded.values(), start=1):
        for trace in other.data:
            column = {None: 1, "x": 1, "x2": 2}.get(trace.xaxis)
            if column:
                trace.xaxis = trace.yaxis = None
                figure.add_trace(trace, row=row, col=column)
    for column, phase in enumerate(phases, start=1):
        for trace in _series(timings, costs, phase):
            figure.add_trace(trace, row=len(names), col=column)
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.name not in seen
        seen.add(trace.name)
    for row in range(1, len(names) + 1):
        batches = sorted({x for trace in figure.select_traces(row=row) for x in trace.x})
        figure.update_xaxes(type="log", tickvals=batches, title_text="requests in the batch", row=row)
    for note in figure.layout.annotations:
        note.font.size = 13
    figure.update_yaxes(type="log", dtick=1, exponentformat="none")
    figure.update_yaxes(title_text="milliseconds", col=1)
    figure.update_yaxes(title_text=_unit(timings, phases[0])[1], row=len(names), col=1)
    panels = 310 * len(names)
    figure.update_layout(
        title=title, legend=LEGEND_ABOVE | {"y": 1 + 30 / panels}, margin={"t": 136, "b": 104}, height=240 + panels
    )
    return figure


def _unit(timings: Sequence[MemoryTiming], phase: str) -> tuple[float, str]:
    """Seconds that are 1 on the axis, and its title: a GPU's times are absolute, those of a CPU, shared with who knows
    what, are told by the compiled manager's for the smallest batch (the device's twin where there is none)."""
    if any(row.kernels == "triton" for row in timings):
        return 1e-3, "milliseconds"
    managers = {row.manager for row in timings}
    manager, name = (
        ("host, compiled", "the compiled manager's") if "host, compiled" in managers else ("device", "our twin's")
    )
    smallest = min(row.batch for row in timings)
    rows = [row for row in timings if row.manager == manager]
    return best(rows, manager, phase, smallest).median, f"times {name} with {smallest} request{'s' * (smallest > 1)}"


def _series(timings: Sequence[MemoryTiming], costs: Sequence[StepCost], phase: str) -> list[go.Scatter]:
    """Median by batch with a bar from least to most; of several thread counts the best at each batch."""
    managers = dict.fromkeys(row.manager for row in timings if row.phase == phase)
    batches = sorted({row.batch for row in timings})
    traces = []
    one, unit = _unit(timings, phase)
    unit = "ms" if unit == "milliseconds" else "x"
    for manager in managers:
        exact = [row for row in timings if row.manager == manager]
        rows = [best(exact, manager, phase, batch) for batch in batches]
        name, colour, symbol = _look(manager, rows[0].kernels)
        traces.append(go.Scatter(
            x=batches, y=[row.median / one for row in rows], name=name, legendgroup=name, mode="lines+markers",
            line={"color": colour, "width": 1.8}, marker={"symbol": symbol, "size": 8},
            error_y={
                "type": "data", "symmetric": False, "thickness": 1, "width": 3,
                "array": [(row.most - row.median) / one for row in rows],
                "arrayminus": [(row.median - row.least) / one for row in rows],
            },
            customdata=[[row.threads, row.repeats, row.pages] for row in rows],
            hovertemplate="batch %{x}: %{y:.3f} " + unit + ", %{customdata[0]} threads, n %{customdata[1]}, "
            "%{customdata[2]} pages<extra>" + name + "</extra>",
        ))  # fmt: skip
    own = [cost for cost in costs if cost.phase == phase]
    if own:
        traces.append(go.Scatter(
            x=[cost.batch for cost in own], y=[cost.median / one for cost in own], name="the model itself",
            legendgroup="model", mode="lines+markers", line={"color": "#000000", "dash": "dash", "width": 1.5},
            marker={"symbol": "x", "size": 7}, hovertemplate="batch %{x}: %{y:.2f} ms<extra>the model</extra>",
        ))  # fmt: skip
    return traces


def _look(manager: str, kernels: str) -> tuple[str, str, str]:
    """Name, colour and symbol of a manager's line."""
    if manager == "device" and kernels != "triton":
        return "ours, torch twin on a CPU", PALETTE[5], "diamond-open"
    return {
        "device": ("ours, on the GPU", PALETTE[0], "circle"),
        "device, CUDA graph": ("ours, CUDA graph", PALETTE[2], "square"),
        "host, compiled": ("CPU, compiled", PALETTE[4], "triangle-up"),
        "host, Python": ("CPU, Python", PALETTE[1], "diamond"),
    }[manager]
