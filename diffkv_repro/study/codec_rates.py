"""What coding a KV cache on a GPU costs, as measurements of the figure ``ours-codec-gpu``."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import Provenance, capture
from diffkv_repro.evaluation.gpu_rates import CacheShape, CodecRate
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.codec_rates import rates_by_codec
from diffkv_repro.study.records import Measurement, Record, record_path, record_text

CODEC_GPU = "ours-codec-gpu"
ANS = "nvcomp-ans"


def codec_rates(rows: Sequence[CodecRate]) -> dict[str, Measurement]:
    """The measurements of ``ours-codec-gpu``: the worst length of each, percentages as [least, most]."""
    good = [row for row in rows if not row.error]
    found: dict[str, Measurement] = {}
    for name, stage in (("encode", "whole encode"), ("decode", "whole decode")):
        own = [row for row in good if (row.codec, row.stage) == (ANS, stage)]
        if own:
            worst = min(own, key=lambda row: row.rate)
            alone = [row.rate / 1e9 for row in good if (row.codec, row.stage) == (ANS, f"codec {name}")]
            note = f"{worst.tokens:,} tokens; the codec alone from {min(alone):.0f} GB/s; ratio {worst.ratio:.2f}"
            found[f"ans_{name}_gb_per_second"] = Measurement(worst.rate / 1e9, "GB/s", worst.repeats, note)
            found[f"ans_{name}_percent_of_copy"] = _percent(own)
    for name, stage in (("quantise", "quantise"), ("dequantise", "dequantise")):
        fused = {row.tokens: row for row in good if row.stage == f"{stage}, fused"}
        eager = {row.tokens: row for row in good if row.stage == f"{stage}, eager"}
        both = sorted(set(fused) & set(eager))
        if both:
            least = min(both, key=lambda tokens: eager[tokens].median / fused[tokens].median)
            note = f"{least:,} tokens; {fused[least].rate / 1e9:.0f} against {eager[least].rate / 1e9:.0f} GB/s"
            ratio = eager[least].median / fused[least].median
            found[f"fused_{name}_over_eager"] = Measurement(ratio, "x", fused[least].repeats, note)
            found[f"fused_{name}_percent_of_copy"] = _percent(list(fused.values()))
    failed = {row.codec: row.error for row in rows if row.error}
    if rows:
        found["codecs_that_failed"] = Measurement(
            len(failed), "codecs", len({row.codec for row in rows if row.codec != "none"}),
            "; ".join(f"{codec}: {error}" for codec, error in failed.items()),
        )  # fmt: skip
    return found


def codec_basis(rows: Sequence[CodecRate]) -> str:
    """What was measured, for a figure's foot."""
    lengths = " and ".join(f"{tokens:,}" for tokens in sorted({row.tokens for row in rows}))
    return f"{rows[0].device}; FP16 cache of {lengths} tokens; {rows[0].content}" if rows else ""


def codec_config(rows: Sequence[CodecRate], shape: CacheShape) -> dict[str, Any]:
    """What those measurements depend on."""
    return asdict(shape) | {"codec_tokens": sorted({row.tokens for row in rows}), "content": rows[0].content}


def record_codec_rates(
    folder: Path, rows: Sequence[CodecRate], shape: CacheShape | None = None, provenance: Provenance | None = None
) -> Path:
    """Keep a measurement made outside a notebook in ``folder``, with its figure and provenance (of now, unless given).

    Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("no rates were measured")
    if provenance is None:
        config = codec_config(rows, shape or CacheShape())
        provenance = capture(root=project_root(), seed=0, profile="gpu", config=config)
    figure = drawing.finish(rates_by_codec(rows), "<br>".join([codec_basis(rows), provenance.summary()]))
    record = Record(CODEC_GPU, provenance.as_dict(), codec_rates(rows), drawing.as_data(figure))
    return write_text(record_path(folder, CODEC_GPU), record_text(record))


def _percent(rows: Sequence[CodecRate]) -> Measurement:
    shares = [100 * row.of_copy for row in rows]
    return Measurement([round(min(shares), 1), round(max(shares), 1)], "%", min(row.repeats for row in rows))
