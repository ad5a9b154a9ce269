"""Labels of Figure 11, of what was measured here and of what was recorded elsewhere."""

import json

import pandas as pd
import plotly.graph_objects as go
import pytest

from diffkv_repro.study.drawing import as_data
from diffkv_repro.study.plots.frontier import loss_against_bytes

POINTS = pd.DataFrame({
    "method": ["DiffKV a", "DiffKV b", "H2O 25 %", "KVQuant 3-bit", "Quest 50 %", "SnapKV 50 %", "DuoAttention 50 %"],
    "true": [0.3, 0.4, 0.22, 0.22, 1.06, 0.61, 0.6],
    "nominal": [0.25, 0.35, 0.2, 0.2, 1.0, 0.6, 0.6],
    "added_nll": [0.02, 0.01, 0.2, 0.07, 0.05, 0.07, 0.071],
})  # fmt: skip
POINTS["low"], POINTS["high"] = POINTS["added_nll"] / 2, POINTS["added_nll"] * 2


@pytest.mark.parametrize("panels", [1, 2])
def test_labels_keep_apart_and_inside(panels):
    curves = {"DiffKV": ["DiffKV a", "DiffKV b"]}
    first = loss_against_bytes(POINTS, curves, {}, "one")
    kept = go.Figure(json.loads(json.dumps(as_data(first))))  # as a record holds it
    figure = loss_against_bytes(POINTS, curves, {"another": kept} if panels == 2 else {}, "one")
    labelled = [trace for trace in figure.data if trace.text is not None]
    assert len(labelled) == panels
    for trace in labelled:
        places = dict(zip(trace.text, trace.textposition, strict=True))
        assert places["Quest 50 %"].endswith("left"), "nothing is right of it"
        assert places["KVQuant 3-bit"].endswith("right"), "nothing is left of it"
        assert places["SnapKV 50 %"] != places["DuoAttention 50 %"]
