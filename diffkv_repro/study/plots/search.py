"""Figures of notebook 11: subsets and ranks, a search's proposals, the three-dimensional front, the ablations."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.kvserve.history import AskTell
from diffkv_repro.kvserve.search_facts import Trial
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE, PAPER_COLOUR
from diffkv_repro.study.grey import SYMBOLS

_GREY = "#999999"


def subsets(
    sizes: Sequence[int], errors: np.ndarray, full: int, published: Mapping[str, Sequence[float]],
    ratios: Mapping[str, Sequence[float]],
) -> go.Figure:  # fmt: skip
    """Figure 8. Left: spread of a sample's error over its size, ``errors`` [plain and stratified, sizes, seeds], in
    percent of quality. Right: ``ratios`` of some profiles over documents, by name; documents in the order of the mean.
    """
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.1, column_widths=[0.48, 0.52],
        subplot_titles=("error of a sample of documents", "compression ratio, document by document"),
    )  # fmt: skip
    spreads = 100 * errors.std(axis=2)
    for spread, name, colour in zip(spreads, ("drawn at random", "stratified by source"), PALETTE, strict=False):
        figure.add_scatter(
            x=list(sizes), y=spread, name=name, mode="lines+markers", line_color=colour,
            hovertemplate="%{x} documents: %{y:.3f} points<extra>" + name + "</extra>", row=1, col=1,
        )  # fmt: skip
    root = spreads[0, 0] * np.sqrt(sizes[0] / np.asarray(sizes))
    looks = {"color": PAPER_COLOUR, "dash": "dash", "width": 1.5}
    figure.add_scatter(x=list(sizes), y=root, name="1/√n", mode="lines", line=looks, row=1, col=1)
    finite = root * np.sqrt((1 - np.asarray(sizes) / full) / (1 - sizes[0] / full))
    figure.add_scatter(
        x=list(sizes),
        y=finite,
        name=f"1/√n in a set of {full}",
        mode="lines",
        line=looks | {"dash": "dot"},
        row=1,
        col=1,
    )
    share = np.asarray(published["subset_percent"][:-1]) * full / 100
    missed = np.abs(np.asarray(published["accuracy"][:-1]) - published["accuracy"][-1])
    inside = (share >= sizes[0]) & (share <= sizes[-1])
    figure.add_scatter(
        x=share[inside], y=missed[inside], name="paper, one draw of each share", mode="markers",
        marker={"color": PAPER_COLOUR, "symbol": "x", "size": 9}, row=1, col=1,
    )  # fmt: skip
    order = np.argsort(-np.mean(list(ratios.values()), axis=0))
    for (name, own), colour in zip(ratios.items(), PALETTE, strict=False):
        figure.add_scatter(
            x=list(range(1, len(order) + 1)), y=np.asarray(own)[order], mode="lines",
            line={"color": colour, "width": 1.5}, name=name, legend="legend2", row=1, col=2,
        )  # fmt: skip
    ticks = [1, 2, 3, 5, 10, 20, 30, 50, 100]
    figure.update_xaxes(type="log", tickvals=ticks, title_text="documents", row=1, col=1)
    decimals = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    figure.update_yaxes(
        type="log", tickvals=decimals, ticktext=[f"{value:g}" for value in decimals],
        title_text="standard deviation, points of quality", row=1, col=1,
    )  # fmt: skip
    figure.update_xaxes(title_text="document, by the mean of its ratios", row=1, col=2)
    figure.update_yaxes(title_text="compression ratio", row=1, col=2)
    below = {"orientation": "h", "y": -0.2, "yanchor": "top", "font": {"size": 11}, "xanchor": "left"}
    figure.update_layout(
        title="A sample's error falls as 1/√n; profiles keep their order of ratio", height=620, margin_b=200,
        legend=below | {"x": 0}, legend2=below | {"x": 0.54},
    )  # fmt: skip
    return figure


def proposals(searches: Mapping[str, AskTell]) -> go.Figure:
    """Figure 9: a row a search; left the ratio of every proposal, right how many candidates remain."""
    names = [f"{name}: {what}" for name in searches for what in ("proposals", "candidates that remain")]
    figure = make_subplots(
        rows=len(searches), cols=2, horizontal_spacing=0.1, vertical_spacing=0.2, subplot_titles=names
    )
    for row, search in enumerate(searches.values(), start=1):
        steps = pd.DataFrame([vars(step) for step in search.steps])
        looks = ((True, "keeps the quality", PALETTE[2], "circle"), (False, "does not", PALETTE[1], "x"))
        for feasible, name, colour, symbol in looks:
            own = steps[steps["feasible"] == feasible]
            figure.add_scatter(
                x=own["iteration"], y=own["ratio"], mode="markers", name=name, legendgroup=name,
                showlegend=row == 1,
                marker={"color": colour, "symbol": symbol, "size": 8}, customdata=100 * own["quality"].astype(float),
                hovertemplate="iteration %{x}: ratio %{y:.2f}, quality %{customdata:.1f} %<extra></extra>",
                row=row, col=1,
            )  # fmt: skip
        reached = steps[steps["best"] > 0]
        figure.add_scatter(
            x=reached["iteration"], y=reached["best"], mode="lines", name="best so far", legendgroup="best",
            showlegend=row == 1, line={"color": PALETTE[0], "dash": "dash", "shape": "hv"}, row=row, col=1,
        )  # fmt: skip
        figure.add_scatter(
            x=[0, *steps["iteration"]], y=[len(search.pool), *steps["remaining"]], mode="lines", showlegend=False,
            line={"color": PALETTE[0], "shape": "hv"}, fill="tozeroy", row=row, col=2,
        )  # fmt: skip
        later = steps[steps["phase"] == "exploitation"]
        if len(later):
            for column in (1, 2):
                figure.add_vline(
                    x=float(later["iteration"].iloc[0]) - 0.5, line={"color": PAPER_COLOUR, "dash": "dot", "width": 1},
                    row=row, col=column,
                )  # fmt: skip
        figure.update_yaxes(title_text="compression ratio", row=row, col=1)
        figure.update_yaxes(title_text="candidates", rangemode="tozero", row=row, col=2)
        figure.update_xaxes(title_text="evaluation", row=row)
    figure.update_layout(
        title="Few candidates are evaluated; results prune the others", height=340 * len(searches) + 160,
        legend=LEGEND_ABOVE, margin_t=128,
    )  # fmt: skip
    return figure


def front(points: pd.DataFrame) -> go.Figure:
    """Figure 10, to be turned: ``ratio``, ``quality`` and ``slower`` (encoding and decoding, times the fastest) of each
    ``profile``; ``flat`` and ``deep`` say which are on the front of ratio and quality, and of all three."""
    figure = go.Figure()
    groups = (
        ("dominated", ~points["deep"], _GREY, "circle", 3),
        ("on the front already by ratio and quality", points["deep"] & points["flat"], PALETTE[0], "diamond", 6),
        ("on it for its latency", points["deep"] & ~points["flat"], PALETTE[1], "circle", 5),
    )
    for name, mask, colour, symbol, size in groups:
        own = points[mask]
        figure.add_scatter3d(
            x=own["ratio"], y=100 * own["quality"], z=own["slower"], mode="markers", name=f"{name}: {len(own)}",
            text=own["profile"], marker={"color": colour, "size": size, "symbol": symbol},
            hovertemplate="%{text}<br>ratio %{x:.2f}, quality %{y:.1f} %, %{z:.2f} times the fastest<extra></extra>",
        )  # fmt: skip
    kept = int((points["deep"] & ~points["flat"]).sum())
    titles = {"x": "compression ratio", "y": "quality, %", "z": "encoding + decoding, x fastest"}
    axes = {f"{axis}axis": {"title": {"text": text}, "backgroundcolor": "#F6F6F6"} for axis, text in titles.items()}
    axes["zaxis"]["autorange"] = "reversed"
    figure.update_layout(
        title=f"Measured latency keeps {kept} profiles that ratio and quality alone would drop", height=680,
        scene=axes | {"camera": {"eye": {"x": 1.5, "y": -1.8, "z": 0.6}, "center": {"x": 0, "y": 0, "z": -0.2}}},
        legend={"orientation": "h", "x": 0, "y": -0.02, "yanchor": "top"}, margin={"l": 10, "r": 10, "t": 70, "b": 110},
    )  # fmt: skip
    return figure


def ablations(trials: Mapping[str, Sequence[Trial]], own: Sequence[str], candidates: int) -> go.Figure:
    """Figure 16 left, by arm: evaluations until the best ratio is within 1 % of the true one, median and quartiles; and
    how the ratio gets there.

    ``own`` are the variants of Algorithm 1; all other arms are what the paper lacks. The title says which of those
    reach the best ratio sooner.
    """
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.12, column_widths=[0.46, 0.54],
        subplot_titles=("until within 1 % of the best", "on the way, median"),
    )  # fmt: skip
    colours = dict(zip(trials, [*PALETTE, "#8C564B", "#9467BD", "#7F7F7F"], strict=False))
    longest = max(len(trial.curve) for many in trials.values() for trial in many)
    until = {name: np.quantile([t.until for t in many], (0.25, 0.5, 0.75)) for name, many in trials.items()}
    for name, many in trials.items():
        low, middle, high = until[name]
        symbol = SYMBOLS[list(trials).index(name) % len(SYMBOLS)] + ("" if name in own else "-open")
        figure.add_scatter(
            x=[middle], y=[name], mode="markers", showlegend=False,
            marker={"size": 11, "color": colours[name], "symbol": symbol if middle < candidates else "x"},
            error_x={"type": "data", "symmetric": False, "array": [high - middle], "arrayminus": [middle - low]},
            hovertemplate="%{x} evaluations<extra>" + name + "</extra>", row=1, col=1,
        )  # fmt: skip
        padded = [list(t.curve) + [t.curve[-1]] * (longest - len(t.curve)) for t in many]
        figure.add_scatter(
            x=list(range(1, longest + 1)), y=100 * np.median(padded, axis=0), name=name, mode="lines",
            line={"color": colours[name], "width": 2, "dash": "solid" if name in own else "dash"}, row=1, col=2,
        )  # fmt: skip
    dotted = {"line": {"color": PAPER_COLOUR, "dash": "dot", "width": 1}}
    for column in (1, 2):
        figure.add_vline(x=0.15 * candidates, **dotted, row=1, col=column)
    ticks = [step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if step < 0.8 * candidates]
    figure.update_xaxes(
        type="log", tickvals=[*ticks, candidates], ticktext=[*map(str, ticks), "never"],
        range=np.log10([0.8 * min(low for low, _, _ in until.values()), 1.2 * candidates]).tolist(), row=1, col=1,
    )  # fmt: skip
    figure.update_xaxes(title_text=f"evaluations (dotted: 15 % of {candidates})")
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_yaxes(title_text="best ratio, % of the true best", range=[70, 101], row=1, col=2)
    middles = {name: float(middle) for name, (_, middle, _) in until.items()}
    sooner = [name for name in trials if name not in own and middles[name] < middles["full"]]
    said = f"{' and '.join(sooner)} {'is' if len(sooner) == 1 else 'are'} sooner" if sooner else "no rival is sooner"
    figure.update_layout(
        title=f"Algorithm 1 is within 1 % after {middles['full']:g} evaluations in the median; {said}",
        title_font_size=17, height=600, margin_b=190, margin_l=170,
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
    )  # fmt: skip
    return figure
