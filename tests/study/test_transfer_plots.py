"""The figures of notebooks 13 and 14 show every arm, every bandwidth and the numbers that they are given."""

import pandas as pd
import pytest

from diffkv_repro.study.plots import prefix, transfer

GBPS = [0.1, 1.0]
ARMS = ["none", "kivi-2bit", "adaptive"]


def table(arms=ARMS):
    return pd.DataFrame({arm: [1.0 + place, 0.2 + place] for place, arm in enumerate(arms)}, index=GBPS)


def test_boxes_and_arrows_of_the_architecture_are_all_there():
    boxes = {"A": ["one", "two"], "B": ["three"], "C": [], "D": ["four"]}
    figure = transfer.architecture(boxes, [("A", "B", "frame"), ("D", "C", "time"), ("C", "A", "choice")], "title")
    texts = [note.text for note in figure.layout.annotations]
    assert len(figure.layout.shapes) == 4
    assert "<b>A</b><br>one<br>two" in texts
    assert {"frame", "time", "choice"} <= set(texts)
    assert sum(bool(note.showarrow) for note in figure.layout.annotations) == 3


def test_completion_times_are_relative_to_the_best_static_one():
    figure = transfer.completion(
        table(), {0.1: "kivi-2bit", 1.0: "none"}, pd.Series({"none": 5.0, "adaptive": 5.1}), "t"
    )
    bars = {trace.name: list(trace.y) for trace in figure.data if trace.name}
    assert bars["none"] == pytest.approx([1.0, 1.0])
    assert bars["adaptive"] == pytest.approx([3.0, 11.0])
    assert list(figure.data[0].x) == ["0.1 Gbps<br>kivi-2bit", "1 Gbps<br>none"]


def test_times_by_bandwidth_show_measured_predicted_simulated_and_published():
    replay = pd.DataFrame({"none": [9.0], "cachegen": [2.0], "adaptive": [1.9]}, index=[5.0])
    published = {"default": [9520.0], "cachegen": [1883.0], "kivi": [2020.0], "kvserve": [1695.0]}
    figure = transfer.against_bandwidth(table(), table(ARMS[:2]), {"kivi-2bit": 0.5}, replay, published, [5.0])
    named = {trace.name: trace for trace in figure.data}
    assert {"none", "kivi-2bit", "adaptive", "none, equation 1", "CacheGen, simulated"} <= set(named)
    assert list(named["uncompressed, published"].y) == [9.52]
    ratios = next(trace for trace in figure.data if trace.name == "kivi-2bit" and trace.mode == "markers+lines")
    assert list(ratios.x) == pytest.approx([0.2, 2.0])
    assert list(ratios.y) == pytest.approx([0.5, 0.2 / 1.2])


def test_stages_stack_to_the_whole():
    rows = pd.DataFrame({"encode": [0.1, 0.2], "communication": [3.0, 1.0], "decode": [0.1, 0.1]}, index=["none", "x"])
    figure = transfer.stages({"ours": rows}, {"paper": {"default": [4000.0, 0.0, 19000.0, 0.0, 144.0]}}, "title")
    heights = [sum(trace.y[1] for trace in figure.data if trace.xaxis == "x")]
    assert heights == pytest.approx([1.3])
    assert sum(trace.y[0] for trace in figure.data if trace.xaxis == "x2") == pytest.approx(23.144)


def test_prefix_loads_show_every_form_target_and_speed_up():
    loads = table(ARMS[:2])
    adaptive = pd.DataFrame({0.4: [1.0, 0.2], 0.05: [5.0, 0.2]}, index=GBPS)
    forms = pd.DataFrame({0.4: ["none", "none"], 0.05: ["recompute", "none"]}, index=GBPS)
    gains = pd.Series([2.0, 10.0], index=GBPS)
    figure = prefix.time_to_first_token(loads, adaptive, forms, {0.4: 2.0, 0.05: 0.25}, 5.0, gains, gains / 2)
    named = {trace.name: trace for trace in figure.data}
    assert {"none", "kivi-2bit", "adaptive, target 2 s", "adaptive, target 0.25 s"} <= set(named)
    assert list(named["adaptive, target 0.25 s"].customdata) == ["recompute", "none"]
    assert list(named["over an uncompressed load"].y) == [1.0, 5.0]
