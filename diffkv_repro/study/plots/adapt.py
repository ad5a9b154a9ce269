"""Figures of notebook 09: stage shares, the architecture, static methods by workload, latency against bandwidth."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.evaluation.profile_tables import grid
from diffkv_repro.evaluation.stages import Stages
from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import NO_COMPRESSION, Envelope, MeasuredProfile
from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE, PAPER_COLOUR

# Lightness alone says how good: it reads in grey, and with any colour vision.
_QUALITY = [[0, "#A6611A"], [0.5, "#E8C99A"], [0.85, "#F5F5F5"], [1, "#FFFFFF"]]
_STAGES = {"prefill": PALETTE[0], "communication": PALETTE[1], "decode": PALETTE[2]}


def shares(published: Mapping[str, Mapping[str, Sequence[float]]], devices: Sequence[str],
           ours: Sequence[Stages], gbps: Sequence[float]) -> go.Figure:  # fmt: skip
    """Figure 1: percent of the completion time by stage, above as published by device, below ours by bandwidth.

    ``published`` holds by data set the milliseconds of each stage, one number a device.
    """
    figure = make_subplots(
        rows=2, cols=2, shared_yaxes="rows", horizontal_spacing=0.06, vertical_spacing=0.2,
        subplot_titles=[*(f"published: {name}" for name in published),
                        *(f"measured: {one.tokens} tokens" for one in (ours[0], ours[-1]))],
    )  # fmt: skip
    for column, stages in enumerate(published.values(), start=1):
        total = [sum(times) for times in zip(*stages.values(), strict=True)]
        _stacked(figure, devices, {name: [100 * t / all_ for t, all_ in zip(stages[name], total, strict=True)]
                                   for name in _STAGES}, 1, column)  # fmt: skip
    for column, one in enumerate((ours[0], ours[-1]), start=1):
        rows = {name: [] for name in _STAGES}
        for bandwidth in gbps:
            wire = one.share(bandwidth * GBPS)
            rows["communication"].append(100 * wire)
            for name in ("prefill", "decode"):
                rows[name].append(100 * (1 - wire) * getattr(one, name) / (one.prefill + one.decode))
        _stacked(figure, [f"{bandwidth:g} Gbps" for bandwidth in gbps], rows, 2, column)
    figure.update_xaxes(range=[0, 100], ticksuffix=" %")
    figure.update_xaxes(title_text="share of the completion time", row=2)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack", title="Moving the cache takes most where the link is slow and the prompt long", height=640,
        legend=LEGEND_ABOVE, margin={"l": 150, "r": 40, "t": 128},
    )  # fmt: skip
    return figure


def _stacked(figure: go.Figure, rows: Sequence[str], parts: Mapping[str, Sequence[float]], row: int, col: int) -> None:
    for name, colour in _STAGES.items():
        figure.add_bar(
            y=list(rows), x=list(parts[name]), orientation="h", name=name, legendgroup=name, marker_color=colour,
            showlegend=row == col == 1, text=[f"{value:.0f}" if value >= 6 else "" for value in parts[name]],
            textposition="inside", insidetextanchor="middle", textangle=0, row=row, col=col,
        )  # fmt: skip


def architecture(stages: Mapping[str, Sequence[str]], boxes: Mapping[str, Sequence[str]], sizes: str) -> go.Figure:
    """Figure 2: prefill, pipeline, link and decode from left to right, what chooses the profile below.

    ``stages`` are the parts of the pipeline by stage; ``boxes`` the lines in "prefill", "link", "decode", "profiling",
    "controller"; ``sizes`` a line on what a cache weighs.
    """
    figure = go.Figure()
    places = {
        "prefill": (0.0, 1.5, 2.2, 4.2), "link": (6.4, 7.9, 2.2, 4.2), "decode": (8.5, 10, 2.2, 4.2),
        "profiling": (0.0, 4.2, 0, 1.3), "controller": (4.8, 10, 0, 1.3),
    }  # fmt: skip
    for (name, place), colour in zip(places.items(), (0, 4, 0, 2, 3), strict=True):
        _box(figure, place, name, boxes[name], PALETTE[colour])
    for index, (stage, parts) in enumerate(stages.items()):
        left = 2.1 + 1.3 * index
        rows = textwrap.wrap(", ".join(parts), 19, break_on_hyphens=False)
        _box(figure, (left, left + 1.2, 2.2, 4.2), stage, rows, PALETTE[1], size=10)
    arrows = [(1.5, 3.2, 2.1, 3.2), (5.9, 3.2, 6.4, 3.2), (7.9, 3.2, 8.5, 3.2), (4.2, 0.65, 4.8, 0.65),
              (5.3, 1.3, 5.3, 2.2), (9.3, 2.2, 9.3, 1.3)]  # fmt: skip
    for x, y, to_x, to_y in arrows:
        figure.add_annotation(
            x=to_x, y=to_y, ax=x, ay=y, axref="x", ayref="y", xref="x", yref="y", text="", showarrow=True,
            arrowhead=2, arrowwidth=1.5, arrowcolor="#444444",
        )  # fmt: skip
    for x, text in ((5.35, "a profile for each request"), (9.25, "observed latency")):
        figure.add_annotation(x=x, y=1.75, text=text, showarrow=False, xanchor="left" if x < 9 else "right",
                              font={"size": 11, "color": "#444444"})  # fmt: skip
    figure.add_annotation(x=0, y=4.75, text=sizes, showarrow=False, xanchor="left", font={"size": 13})
    figure.update_xaxes(visible=False, range=[-0.1, 10.1])
    figure.update_yaxes(visible=False, range=[-0.15, 5])
    figure.update_layout(
        title="Profiles are found offline, and chosen for every request online", height=560,
        margin={"l": 24, "t": 72, "b": 72},
    )  # fmt: skip
    return figure


def _box(figure: go.Figure, place: tuple, name: str, rows: Sequence[str], colour: str, size: int = 11) -> None:
    left, right, low, high = place
    figure.add_shape(
        type="rect", x0=left, x1=right, y0=low, y1=high, fillcolor=colour, opacity=0.15, line={"color": colour}
    )
    figure.add_annotation(
        x=(left + right) / 2, y=(low + high) / 2, text=f"<b>{name}</b><br>" + "<br>".join(rows), showarrow=False,
        font={"size": size},
    )  # fmt: skip


def static(summary: pd.DataFrame, published: Mapping[str, pd.DataFrame], threshold: float) -> go.Figure:
    """Figure 3: relative quality in percent and compression ratio by method and workload, ours above and as published.

    ``summary`` as ``profile_quality.summarise`` gives it; cells below ``threshold`` of the quality have grey numbers.
    """
    quality, ratio = 100 * grid(summary, "relative"), grid(summary, "ratio")
    low, high = 100 * grid(summary, "low"), 100 * grid(summary, "high")
    counts = summary.drop_duplicates("workload").set_index("workload")["n"]
    kept = summary["profile"].nunique()
    above, below, between = 46 * kept, 40 * len(published["quality"]), 100
    figure = make_subplots(
        rows=2, cols=2, row_heights=[above, below], vertical_spacing=between / (above + below + between),
        horizontal_spacing=0.05, shared_yaxes="rows",
        subplot_titles=("relative quality, % [95 % interval]", "compression ratio", "published: relative quality, %",
                        "published: compression ratio"),
    )  # fmt: skip
    names = [f"{name}<br>n {counts[name]}" for name in quality.columns]
    good = quality.to_numpy() >= 100 * threshold
    edges = zip(quality.to_numpy().ravel(), low.to_numpy().ravel(), high.to_numpy().ravel(), strict=True)
    text = np.array([f"{mid:.0f}<br>{least:.0f}–{most:.0f}" for mid, least, most in edges]).reshape(quality.shape)
    _heat(figure, quality, text, names, good, 1, 1, limits=(60, 100))
    _heat(figure, ratio, ratio.map("{:.2f}".format).to_numpy(), names, good, 1, 2)
    theirs = published["quality"].to_numpy() >= 100 * threshold
    _heat(figure, published["quality"], published["quality"].map("{:.1f}".format).to_numpy(),
          list(published["quality"].columns), theirs, 2, 1, limits=(60, 100))  # fmt: skip
    _heat(figure, published["ratio"], published["ratio"].map("{:.2f}".format).to_numpy(),
          list(published["ratio"].columns), theirs, 2, 2)  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        title="No static method is both good enough and smallest on every workload",
        height=above + below + between + 204, margin={"l": 120, "t": 100},
    )  # fmt: skip
    return figure


def _heat(figure: go.Figure, table: pd.DataFrame, text: np.ndarray, names: Sequence[str], good: np.ndarray,
          row: int, col: int, limits: tuple[float, float] | None = None) -> None:  # fmt: skip
    shown = np.where(good, table.to_numpy(), np.nan) if limits is None else table.to_numpy()
    bold = np.array([[f"<b>{cell}</b>" if there else cell for cell, there in zip(*pair, strict=True)]
                     for pair in zip(text, good, strict=True)])  # fmt: skip
    figure.add_heatmap(
        x=list(names), y=list(table.index), z=shown, text=bold, texttemplate="%{text}", textfont={"size": 11},
        colorscale="Blues" if limits is None else _QUALITY, showscale=False, xgap=2, ygap=2,
        zmin=limits and limits[0], zmax=limits and limits[1], opacity=0.75, row=row, col=col,
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(tickfont={"size": 11}, showgrid=False, row=row, col=col)
    figure.update_yaxes(tickfont={"size": 11}, showgrid=False, row=row, col=col)


def latency(panels: Mapping[str, tuple[Sequence[MeasuredProfile], float, Sequence[float]]]) -> go.Figure:
    """Figure 4: for each panel (profiles, bytes of the cache, three bandwidths in Gbps) seconds over bandwidth above,
    and encoding, wire and decoding at those bandwidths below. Rings: break-even; dots: where the best one changes."""
    figure = make_subplots(
        rows=2, cols=len(panels), row_heights=[0.6, 0.4], vertical_spacing=0.16, horizontal_spacing=0.1,
        subplot_titles=[*panels, *(f"its parts: {name}" for name in panels)],
    )  # fmt: skip
    for column, (profiles, size, gbps) in enumerate(panels.values(), start=1):
        most = max(profile.break_even for profile in profiles) / GBPS
        bandwidths = np.geomspace(min(min(gbps), most / 60) / 2, 2.5 * most, 200)
        for profile, colour in zip([NO_COMPRESSION, *profiles], (PAPER_COLOUR, *PALETTE), strict=False):
            figure.add_scatter(
                x=bandwidths, y=[size * profile.seconds_per_byte(b * GBPS) for b in bandwidths], name=profile.name,
                legend=f"legend{column if column > 1 else ''}",
                line={"color": colour, "dash": "dash" if profile is NO_COMPRESSION else None}, row=1, col=column,
            )  # fmt: skip
            if profile is not NO_COMPRESSION:
                edge = profile.break_even
                figure.add_scatter(
                    x=[edge / GBPS], y=[size / edge], mode="markers", showlegend=False,
                    marker={"symbol": "circle-open", "size": 11, "color": colour, "line": {"width": 2}},
                    hovertemplate=f"{profile.name} stops paying at %{{x:.3g}} Gbps<extra></extra>", row=1, col=column,
                )  # fmt: skip
        envelope = Envelope(profiles)
        figure.add_scatter(
            x=[edge / GBPS for edge in envelope.bandwidths],
            y=[size * envelope.best(edge).seconds_per_byte(edge) for edge in envelope.bandwidths], mode="markers",
            marker={"color": "black", "size": 6}, showlegend=False, row=1, col=column,
        )  # fmt: skip
        _parts(figure, profiles, size, gbps, column)
    figure.update_xaxes(title_text="bandwidth, Gbps", type="log", dtick=1, exponentformat="power", row=1)
    figure.update_yaxes(type="log", dtick=1, exponentformat="power", row=1)
    figure.update_yaxes(title_text="seconds", row=1, col=1)
    figure.update_yaxes(title_text="seconds", row=2, col=1)
    figure.update_layout(
        barmode="stack", title="The best method depends on the link, and above its own bandwidth none pays", height=820,
        margin={"t": 96, "b": 150},
        legend={"x": 0.44, "xanchor": "right", "y": 0.99, "yanchor": "top", "font": {"size": 11}},
        legend2={"x": 1.0, "xanchor": "right", "y": 0.99, "yanchor": "top", "font": {"size": 11}},
        legend3={"x": 1.0, "xanchor": "right", "y": 0.33, "yanchor": "top", "font": {"size": 11}},
    )  # fmt: skip
    return figure


def _parts(
    figure: go.Figure, profiles: Sequence[MeasuredProfile], size: float, gbps: Sequence[float], column: int
) -> None:
    """Stacked times of every profile at every bandwidth."""
    names = [[f"{b:.2g} Gbps" if b < 10 else f"{b:.0f} Gbps" for b in gbps for _ in range(len(profiles) + 1)],
             [profile.name for _ in gbps for profile in (NO_COMPRESSION, *profiles)]]  # fmt: skip
    pairs = [(b * GBPS, profile) for b in gbps for profile in (NO_COMPRESSION, *profiles)]
    parts = {
        "encode": [size / profile.encode for _, profile in pairs],
        "on the wire": [size / (b * profile.ratio) for b, profile in pairs],
        "decode": [size / profile.decode for _, profile in pairs],
    }
    for (name, values), colour in zip(parts.items(), (PALETTE[3], PALETTE[1], PALETTE[4]), strict=True):
        figure.add_bar(
            x=names, y=values, name=name, marker_color=colour, legendgroup=name, legend="legend3",
            showlegend=column == 1, row=2, col=column,
        )  # fmt: skip
    figure.update_xaxes(tickfont={"size": 9}, tickangle=-90, row=2, col=column)
