"""Figures of notebook 08: the engine's parts, what a step is made of, and what smaller caches buy."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.engine.launch import WorkerResult
from diffkv_repro.engine.measure.experiments import Arrivals, SteadyState
from diffkv_repro.engine.measure.steps import StepTiming
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE
from diffkv_repro.study.grey import SYMBOLS

_PARTS = (
    ("execution", PALETTE[0]), ("decisions", PALETTE[2]), ("scheduling", PALETTE[5]), ("management", PALETTE[3]),
)  # fmt: skip
_BOX = {"line": {"color": "#444444", "width": 1}, "layer": "below"}


def architecture(workers: Sequence[WorkerResult], requests: int) -> go.Figure:
    """Figure 7 from what ran: one scheduler, and a worker a share of heads, with pages and kernels of its own."""
    figure, count = go.Figure(), len(workers)
    _box(figure, 0.0, count, 3.1, 3.9, PALETTE[5], f"<b>scheduler</b><br>{requests} requests; the same in every worker")
    for place, worker in enumerate(workers):
        most, size = max(worker.held), worker.page_bytes
        texts = (
            (
                2.1,
                PALETTE[0],
                f"<b>worker {worker.rank}</b><br>{worker.heads} KV head{'s' * (worker.heads > 1)} a layer",
            ),
            (1.15, PALETTE[2], f"<b>memory manager</b><br>up to {most:,} pages of {size:,} B"),
            (0.2, PALETTE[4], "<b>compressor, attention</b><br>over its own pages"),
        )
        for low, colour, text in texts:
            _box(figure, place + 0.06, place + 0.94, low, low + 0.8, colour, text)
        figure.add_annotation(
            x=place + 0.5, y=2.92, ax=place + 0.5, ay=3.08, axref="x", ayref="y", text="", showarrow=True, arrowhead=2
        )
    figure.update_xaxes(visible=False, range=[-0.02, count + 0.02])
    figure.update_yaxes(visible=False, range=[0, 4.1])
    figure.update_layout(title="One scheduler; every worker manages the pages of its own heads", height=460)
    return figure


def _box(figure: go.Figure, x0: float, x1: float, y0: float, y1: float, colour: str, text: str) -> None:
    figure.add_shape(type="rect", x0=x0, x1=x1, y0=y0, y1=y1, fillcolor=colour, opacity=0.18, **_BOX)
    figure.add_annotation(x=(x0 + x1) / 2, y=(y0 + y1) / 2, text=text, showarrow=False, font={"size": 13})


def step_parts(timings: Sequence[StepTiming]) -> go.Figure:
    """Figure 14: percent of a step by batch size; a panel a phase. Management is written out, being too thin to see."""
    phases = ("prompt", "generation")
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=phases)
    for column, phase in enumerate(phases, start=1):
        own = sorted((row for row in timings if row.phase == phase), key=lambda row: row.batch)
        batches = [str(row.batch) for row in own]
        for part, colour in _PARTS:
            shares = [row.shares()[part] for row in own]
            figure.add_bar(
                x=batches, y=shares, name=part, marker_color=colour, legendgroup=part, showlegend=column == 1,
                text=[f"{share:.2f} %" for share in shares] if part == "management" else None, textposition="outside",
                hovertemplate="batch %{x}: %{y:.2f} %<extra>" + part + "</extra>", row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title_text="requests in the batch", type="category")
    figure.update_yaxes(title_text="% of the step", range=[0, 108], col=1)
    figure.update_layout(title="What a step is made of", barmode="stack", height=480, legend=LEGEND_ABOVE, margin_t=124)
    return figure


def end_to_end(rows: pd.DataFrame, predicted: pd.DataFrame) -> go.Figure:
    """Figure 15b: milliseconds of a generation step over length, a panel a batch size; dashed what bytes alone predict.

    Both tables have columns ``cache``, ``batch``, ``length``, ``seconds``; either may be empty.
    """
    both = pd.concat([rows, predicted])
    batches, caches = sorted(both["batch"].unique()), list(dict.fromkeys(both["cache"]))
    figure = make_subplots(
        rows=1, cols=len(batches), horizontal_spacing=0.07, subplot_titles=[f"{batch} requests" for batch in batches]
    )
    for column, batch in enumerate(batches, start=1):
        for cache, colour, symbol in zip(caches, PALETTE, SYMBOLS, strict=False):
            for table, dash, suffix in ((rows, "solid", ""), (predicted, "dash", ", by bytes")):
                own = table[(table["batch"] == batch) & (table["cache"] == cache)].sort_values("length")
                if len(own):
                    figure.add_scatter(
                        x=own["length"], y=1e3 * own["seconds"], name=cache + suffix, legendgroup=cache + suffix,
                        showlegend=column == 1, mode="lines+markers", row=1, col=column,
                        line={"color": colour, "dash": dash, "width": 1.5},
                        marker={"symbol": symbol + ("" if dash == "solid" else "-open"), "size": 7},
                    )  # fmt: skip
    lengths = sorted(both["length"].unique())
    figure.update_xaxes(
        title_text="tokens a request", type="log", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths]
    )
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="milliseconds a step", col=1)
    figure.update_layout(title="A generation step end to end", height=480, legend=LEGEND_ABOVE, margin_t=136)
    return figure


def latency_by_rate(served: Mapping[str, Arrivals]) -> go.Figure:
    """Figure 16: mean and 95th percentile of latency per token over the request rate, a colour a cache."""
    figure = go.Figure()
    for (name, own), colour in zip(served.items(), PALETTE, strict=False):
        rows = own.served
        rates = [row.rate for row in rows]
        for label, values, dash in (
            ("mean", [1e3 * row.mean for row in rows], "solid"), ("95 %", [1e3 * row.tail() for row in rows], "dot"),
        ):  # fmt: skip
            figure.add_scatter(
                x=rates, y=values, name=f"{name}, {label}", mode="lines+markers", line={"color": colour, "dash": dash}
            )
    rates = sorted({row.rate for own in served.values() for row in own.served})
    figure.update_xaxes(title_text="requests a second", type="log", tickvals=rates, ticktext=[f"{r:g}" for r in rates])
    figure.update_yaxes(title_text="ms a generated token", type="log")
    figure.update_layout(
        title="Latency under Poisson arrivals, queueing included, in virtual time",
        height=480,
        legend=LEGEND_ABOVE,
        margin_t=124,
    )
    return figure


def throughput(found: Mapping[str, Mapping[str, SteadyState]]) -> go.Figure:
    """Figure 17: tokens a second and mean batch of each model, a bar a cache (all models have the same caches)."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=("tokens a second", "mean batch"))
    caches = list(next(iter(found.values())))
    for cache, colour in zip(caches, PALETTE, strict=False):
        rows = [own[cache].found for own in found.values()]
        for column, values in enumerate(([row.per_second for row in rows], [row.mean_batch for row in rows]), start=1):
            figure.add_bar(
                x=list(found), y=values, name=cache, marker_color=colour, legendgroup=cache, showlegend=column == 1,
                text=[f"{value:,.{0 if value >= 100 else 1}f}" for value in values], textposition="outside",
                textfont_size=10, row=1, col=column,
            )  # fmt: skip
    figure.update_layout(
        title="A steady state under the papers' memory limits", barmode="group", height=500, legend=LEGEND_ABOVE,
        margin_t=124,
    )  # fmt: skip
    return figure


def batch_by_memory(rows: pd.DataFrame) -> go.Figure:
    """What the pools of the papers' cards hold: full requests by cache, a group a model (columns ``model``, ``cache``,
    ``requests``)."""
    figure = go.Figure()
    for cache, colour in zip(dict.fromkeys(rows["cache"]), PALETTE, strict=False):
        own = rows[rows["cache"] == cache]
        figure.add_bar(
            x=own["model"], y=own["requests"], name=cache, marker_color=colour,
            text=[f"{value:.1f}" for value in own["requests"]], textposition="outside",
        )  # fmt: skip
    most = int(np.ceil(np.log10(rows["requests"].max())))
    ticks = [digit * 10**power for power in range(most + 1) for digit in (1, 2, 5)]
    figure.update_yaxes(
        title_text="requests of full length", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks]
    )
    figure.update_layout(
        title="Requests that the memory of the papers' cards holds", barmode="group", height=480, legend=LEGEND_ABOVE,
        margin_t=112,
    )  # fmt: skip
    return figure
