"""The bandwidth explorer: which profile is best at a bandwidth, and what a slow-down of the codecs changes."""

import dataclasses
import math
from collections.abc import Sequence

import ipywidgets
import plotly.graph_objects as go

from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import Envelope, MeasuredProfile
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.bandwidth import envelope


def draw_envelope(profiles: Sequence[MeasuredProfile], gbps: float, slowdown: float = 1.0) -> go.Figure:
    """The envelope with every codec ``slowdown`` times slower, marked at ``gbps``. Raises ValueError for 0 or less."""
    for name, value in (("gbps", gbps), ("slowdown", slowdown)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    slowed = [
        dataclasses.replace(profile, encode=profile.encode / slowdown, decode=profile.decode / slowdown)
        for profile in profiles
    ]
    best = Envelope(slowed).best(gbps * GBPS).name
    title = f"At {gbps:.3g} Gbps, codecs {slowdown:.3g} times slower: {best}"
    figure = envelope({"thick: the candidates": slowed}, title=title, at=gbps * GBPS)
    return drawing.finish(figure, "grey: the lower envelope; dotted: its breakpoints; rings: break-even bandwidths")


def bandwidth_explorer(profiles: Sequence[MeasuredProfile]) -> ipywidgets.VBox:
    """Choose a bandwidth and a slow-down, see the candidates.

    Without an ``Output`` widget: those swallow what a callback raises, and nbclient waits for them in vain.
    """
    edges = [edge / GBPS for edge in Envelope(profiles).bandwidths]
    ends = [math.log10(edges[-1] / 4), math.log10(edges[0] * 4)]
    bandwidth = ipywidgets.FloatLogSlider(
        value=edges[0] / 2, min=ends[0], max=ends[1], step=0.02, description="Gbps", continuous_update=False
    )
    slowdown = ipywidgets.FloatLogSlider(
        value=1, min=-1, max=1, step=0.05, description="slow-down", continuous_update=False
    )
    box = ipywidgets.VBox()

    def show(_: object = None) -> None:
        picture = go.FigureWidget(draw_envelope(profiles, bandwidth.value, slowdown.value))
        box.children = (ipywidgets.HBox([bandwidth, slowdown]), picture)

    for control in (bandwidth, slowdown):
        control.observe(show, names="value")
    show()
    return box
