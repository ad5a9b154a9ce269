"""What Figure 13 compares: the timings of the memory managers as a table, and the ratios that its claims ask for."""

import warnings
from collections.abc import Iterable, Sequence

import pandas as pd
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.bench_memory import TIERS, MemoryTiming
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.models.step_cost import StepCost


def timing_table(timings: Iterable[MemoryTiming]) -> pd.DataFrame:
    """Milliseconds of each manager, a row each, in the order of the phases and batches."""
    rows = [
        {
            "phase": row.phase, "batch": row.batch, "manager": row.manager, "with": row.kernels,
            "threads": row.threads, "clock": row.clock, "median ms": 1000 * row.median, "least ms": 1000 * row.least,
            "most ms": 1000 * row.most, "pages": row.pages, "repeats": row.repeats,
        }
        for row in timings
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    return table.sort_values(["phase", "batch", "manager", "threads"], ascending=[False, True, True, True])


def best(timings: Iterable[MemoryTiming], manager: str, phase: str, batch: int) -> MemoryTiming:
    """The quickest of ``manager``, whatever its threads, by the clock of the host: from the call to the device done.

    ``device`` includes its CUDA graph. Raises ValueError where nothing of it was timed.
    """
    found = [
        row
        for row in timings
        if row.manager.startswith(manager) and (row.phase, row.batch, row.clock) == (phase, batch, "host")
    ]
    if not found:
        raise ValueError(f"no timing of {manager!r} in the {phase} phase at batch {batch}")
    return min(found, key=lambda row: row.median)


def bars(timings: Sequence[MemoryTiming], costs: Iterable[StepCost]) -> dict[str, float]:
    """What our bars on the device's manager are about, at the largest batch: ``generation_step_in_graph_us`` by the
    clock of the device, and its percent of the prompt step and of the generation step."""
    batch, shares = max(row.batch for row in timings), step_shares(timings, costs)["device, %"]
    graph = next(
        row for row in timings if (row.manager, row.batch, row.clock) == ("device, CUDA graph", batch, "device")
    )
    return {
        "generation_step_in_graph_us": 1e6 * graph.median,
        "prompt_manager_percent_of_step": float(shares["prompt", batch]),
        "generation_manager_percent_of_step": float(shares["generation", batch]),
    }


def ratios(timings: Sequence[MemoryTiming], phase: str) -> dict[str, float]:
    """Latency of the managers on the host over the device's at the largest batch, and their growths compared.

    Keys: ``compiled``, ``python``, and ``growth``: from the smallest to the largest batch, that of the compiled
    manager over that of the device's.
    """
    batches = sorted({row.batch for row in timings})
    device, compiled, python = (
        [best(timings, manager, phase, batch).median for batch in batches]
        for manager in ("device", "host, compiled", "host, Python")
    )
    return {
        "compiled": compiled[-1] / device[-1],
        "python": python[-1] / device[-1],
        "growth": (compiled[-1] / compiled[0]) / (device[-1] / device[0]),
    }


def step_shares(timings: Sequence[MemoryTiming], costs: Iterable[StepCost]) -> pd.DataFrame:
    """Percent of a step (manager and execution of the model, nothing else) that each manager takes; a row a step."""
    rows = {}
    for cost in costs:
        row = {"model, ms": 1000 * cost.median}
        for manager in ("device", "host, compiled", "host, Python"):
            own = best(timings, manager, cost.phase, cost.batch).median
            row[f"{manager}, %"] = 100 * own / (own + cost.median)
        rows[cost.phase, cost.batch] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["phase", "batch"])


def host_synchronisations(device: torch.device | str, *, batch: int = 4, layers: int = 32, kv_heads: int = 8) -> int:
    """How often a decode step of the manager makes the host wait for the CUDA ``device``.

    Counted by torch while pages are reserved; then the same step is captured in a CUDA graph, in which any wait is an
    error of the driver's, and replayed. Asking for the number of free pages, which waits once, shows that the count
    counts. Raises RuntimeError where that is not seen, or where the graph takes other pages than the step.
    """
    precisions = [Precision.parse(name) for name in TIERS]
    layouts = [PageLayout(precision, 128, search_page_bytes(precisions, 128)) for precision in precisions]
    memory = PagedMemory(
        layouts, pages=16 * batch * layers * kv_heads, layers=layers, kv_heads=kv_heads, max_requests=batch,
        max_tokens=8 * layouts[0].tokens, device=device, pool=False,
    )  # fmt: skip
    slots, active = list(range(batch)), torch.ones(batch, dtype=torch.uint8, device=device)
    page = torch.tensor([layout.tokens for layout in layouts], dtype=torch.int32, device=device)
    memory.admit(slots, [3 * layouts[0].tokens] * batch)
    # The one page of both tiers full in every head: a step takes as many pages as it can.
    memory.compact(slots, page.expand(memory.lengths.shape).contiguous())
    before = memory.synchronize_counts()
    memory.reserve_step(torch.zeros_like(active))  # compiles
    counted = _waits(lambda: memory.reserve_step(active))
    if _waits(memory.synchronize_counts) < 1:
        raise RuntimeError("reading the number of free pages was not counted as a wait; the count proves nothing")
    eager = before - memory.synchronize_counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memory.reserve_step(active)
    memory.lengths.copy_(memory.page_counts * page)
    graph.replay()
    memory.count_steps()
    replayed = before - eager - memory.synchronize_counts()
    if (eager, replayed) != (2 * batch * layers * kv_heads,) * 2:
        raise RuntimeError(f"{eager} pages were taken by a step and {replayed} by its CUDA graph")
    return counted


def _waits(call) -> int:
    """How many waits for the device torch sees in ``call``."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(one.message) for one in caught)
