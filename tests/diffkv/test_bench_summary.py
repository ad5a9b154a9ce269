from dataclasses import replace

import pytest
import torch

from diffkv_repro.diffkv.bench_memory import MemoryTiming
from diffkv_repro.diffkv.bench_summary import bars, best, host_synchronisations, ratios, step_shares, timing_table
from diffkv_repro.models.step_cost import StepCost


def timing(manager, batch, median, **rest):
    row = MemoryTiming(
        manager=manager, phase="prompt", batch=batch, length=8, layers=1, kv_heads=1, median=median, least=median,
        most=median, repeats=3, pages=4, kernels="triton", threads=1, clock="host", device="gpu",
    )  # fmt: skip
    return replace(row, **rest)


ROWS = [
    timing("device", 1, 0.001), timing("device", 8, 0.002),
    timing("device, CUDA graph", 8, 0.0001, clock="device"),
    timing("host, Python", 1, 0.1), timing("host, Python", 8, 0.8),
    timing("host, compiled", 1, 0.01), timing("host, compiled", 8, 0.09), timing("host, compiled", 8, 0.04, threads=4),
]  # fmt: skip


def test_the_best_of_the_threads_by_the_clock_of_the_host_is_compared():
    assert best(ROWS, "host, compiled", "prompt", 8).threads == 4
    assert best(ROWS, "device", "prompt", 8).median == 0.002
    faster = [*ROWS, timing("device, CUDA graph", 8, 0.001)]
    assert best(faster, "device", "prompt", 8).median == 0.001
    assert ratios(ROWS, "prompt") == pytest.approx({"compiled": 20, "python": 400, "growth": 2})
    with pytest.raises(ValueError, match="no timing of 'device' in the generation phase at batch 8"):
        best(ROWS, "device", "generation", 8)


def test_what_the_bars_are_about_is_of_the_largest_batch():
    rows = [replace(row, phase=phase) for row in ROWS for phase in ("prompt", "generation")]
    graph = {"manager": "device, CUDA graph", "phase": "generation"}
    rows += [timing(batch=8, median=8e-5, **graph), timing(batch=1, median=1e-5, **graph, clock="device")]
    found = bars(rows, [StepCost("prompt", 8, 8, 0.038, 5), StepCost("generation", 8, 8, 0.00072, 5)])
    assert found == pytest.approx(
        {"generation_step_in_graph_us": 100, "prompt_manager_percent_of_step": 5,
         "generation_manager_percent_of_step": 10}
    )  # fmt: skip


def test_shares_of_a_step():
    shares = step_shares(ROWS, [StepCost("prompt", 8, 8, 0.04, 5)])
    assert shares.loc["prompt", 8].to_dict() == pytest.approx(
        {"model, ms": 40, "device, %": 100 / 21, "host, compiled, %": 50, "host, Python, %": 100 * 0.8 / 0.84}
    )


def test_the_table_has_milliseconds_and_every_row():
    table = timing_table(reversed(ROWS))
    assert len(table) == len(ROWS)
    assert table["batch"].is_monotonic_increasing
    assert table.iloc[0][["manager", "median ms"]].tolist() == ["device", 1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_decode_step_never_waits_for_the_device():
    assert host_synchronisations("cuda") == 0
