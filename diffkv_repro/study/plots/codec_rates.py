"""The figure of codecs on a GPU: rates of raw KV, in and out, against a plain copy."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffkv_repro.study.drawing import LEGEND_ABOVE, PALETTE

_WAYS = (("in", "quantise", "whole encode", PALETTE[0]), ("out", "dequantise", "whole decode", PALETTE[4]))


def rates_by_codec(rows: Sequence[Any]) -> go.Figure:
    """``rows`` are ``evaluation.gpu_rates.CodecRate`` s: a bar a codec and direction, quantiser included, one panel a
    length; dashed, the copy of the same cache. A codec that failed has the word in its place."""
    lengths = sorted({row.tokens for row in rows})
    figure = make_subplots(
        rows=max(1, len(lengths)), cols=1, shared_xaxes=True, vertical_spacing=0.1,
        subplot_titles=[f"{tokens:,} tokens" for tokens in lengths],
    )  # fmt: skip
    codecs = [name for name in dict.fromkeys(row.codec for row in rows) if name != "none"]
    places = ["quantiser,<br>eager", "quantiser,<br>fused", *(_short(name) for name in codecs)]
    rates = [row.rate / 1e9 for row in rows if not row.error]
    floor = math.floor(math.log10(min(rates, default=1)))
    for panel, tokens in enumerate(lengths, start=1):
        at = {(row.codec, row.stage): row for row in rows if row.tokens == tokens}
        for name, quantiser, whole, colour in _WAYS:
            own = [at.get(("none", f"{quantiser}, {kind}")) for kind in ("eager", "fused")]
            own += [at.get((codec, whole)) for codec in codecs]
            heights = [row.rate / 1e9 if row is not None and not row.error else None for row in own]
            figure.add_bar(
                x=places, y=heights, name=name, legendgroup=name, showlegend=panel == 1, marker_color=colour,
                text=[_number(height) for height in heights], textposition="outside", textangle=0,
                textfont={"size": 10}, cliponaxis=False,
                hovertemplate="%{x}, " + name + ": %{y:.4g} GB/s<extra></extra>", row=panel, col=1,
            )  # fmt: skip
        copy = at.get(("none", "copy"))
        if copy is not None and not copy.error:
            height = copy.rate / 1e9
            figure.add_hline(y=height, line={"color": "#444444", "dash": "dash", "width": 1}, row=panel, col=1)
            figure.add_annotation(  # where axes are logarithmic, annotations stand at the logarithm
                x=1, xref="x domain", y=math.log10(height), text=f"a plain copy: {_number(height)}", showarrow=False,
                xanchor="right", yanchor="bottom", font={"size": 11}, row=panel, col=1,
            )  # fmt: skip
        for codec, place in zip(codecs, places[2:], strict=True):
            if all(row.error for (own, _), row in at.items() if own == codec):
                figure.add_annotation(
                    x=place, y=floor + 0.1, text="failed", showarrow=False, textangle=-90, yanchor="bottom", row=panel,
                    col=1,
                )  # fmt: skip
    top = max(rates, default=1)
    figure.update_yaxes(type="log", dtick=1, range=[floor, math.log10(top) + 0.35], title_text="GB/s of raw FP16")
    figure.update_layout(
        title="Quantising and coding a KV cache on the GPU (codecs: with the fused quantiser)",
        height=220 + 290 * max(1, len(lengths)), legend=LEGEND_ABOVE | {"y": 1.03}, margin_t=118, bargap=0.25,
    )  # fmt: skip
    return figure


def _number(height: float | None) -> str:
    return "" if not height else f"{height:,.0f}" if height >= 100 else f"{height:.3g}"


def _short(codec: str) -> str:
    names = {"ans": "ANS", "bitcomp": "Bitcomp", "cascaded": "Cascaded", "lz4": "LZ4", "zstd": "Zstd"}
    return names.get(codec.removeprefix("nvcomp-"), codec)
