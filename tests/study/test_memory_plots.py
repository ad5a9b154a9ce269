"""What the figures of notebook 06 show, without a browser."""

import plotly.graph_objects as go
import pytest

from diffkv_repro.diffkv.bench_memory import MemoryTiming
from diffkv_repro.diffkv.memory_example import figure_6
from diffkv_repro.models.step_cost import StepCost
from diffkv_repro.study.drawing import as_data, finish
from diffkv_repro.study.plots import memory as plots


def timings():
    common = {"length": 8, "layers": 1, "kv_heads": 1, "repeats": 3, "pages": 4, "threads": 1, "device": "gpu"}
    managers = {"device": "triton", "device, CUDA graph": "triton", "host, Python": "numpy", "host, compiled": "numba"}
    return [
        MemoryTiming(
            manager=manager,
            kernels=kernels,
            phase=phase,
            batch=batch,
            median=0.01 * batch,
            least=0.005 * batch,
            most=0.02 * batch,
            clock="host",
            **common,
        )
        for phase in ("prompt", "generation")
        for batch in (1, 8)
        for manager, kernels in managers.items()
        if (manager, phase) != ("device, CUDA graph", "prompt")
    ]


def draw(recorded=None):
    costs = [StepCost("generation", batch, 8, 0.03, 5) for batch in (1, 8)]
    return plots.management(timings(), costs, title="t", where="here", recorded=recorded or {})


def test_figure_6_shows_the_live_tables_and_the_ends_of_the_list():
    _, _, steps = figure_6()
    figure = plots.worked_example(steps)
    tables = {trace.xaxis: [page for page in trace.text if page] for trace in figure.select_traces(row=2) if trace.text}
    assert list(tables.values()) == [
        [], ["5", "6", "7", "8", "9", "10", "11", "12"], ["5", "6", "7", "8", "9", "10", "11", "12"],
        ["5", "8", "9", "10", "12"],
    ]  # fmt: skip
    planned = next(trace for trace in figure.select_traces(row=2, col=3) if trace.text)
    high, low, back = "kept, high tier", "kept, low tier", "to give back"
    assert [name for name in planned.customdata if name != "empty"] == [high, back, back, low, high, high, back, low]
    labels = [note.text for note in figure.layout.annotations]
    assert labels.count("<b>head = tail</b>") == 2
    assert {"<b>head</b>", "<b>tail</b>", "3 of 13<br>free", "4. 6, 7, 11 go back"} <= set(labels)


def test_figure_13_has_a_line_for_each_manager_with_a_bar_from_least_to_most():
    figure = draw()
    assert [trace.name for trace in figure.select_traces(col=2)] == [
        "ours, on the GPU", "ours, CUDA graph", "CPU, Python", "CPU, compiled", "the model itself"
    ]  # fmt: skip
    line = figure.data[0]
    assert (list(line.x), list(line.y)) == ([1, 8], [10, 80])
    assert list(line.error_y.array) == pytest.approx([10, 80])
    assert list(line.error_y.arrayminus) == pytest.approx([5, 40])


def test_recorded_panels_stand_above_under_their_label():
    old = go.Figure(as_data(finish(draw(), "foot")))
    figure = draw({"recorded on a GPU": old})
    labels = [note.text for note in figure.layout.annotations]
    assert labels == [
        f"{phase}: {name}" for name in ("recorded on a GPU", "here") for phase in ("prompt", "generation")
    ]
    for column in (1, 2):
        above, below = ([trace.name for trace in figure.select_traces(row=row, col=column)] for row in (1, 2))
        assert above == below
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert len(legend) == len(set(legend)) == 5
