"""What this package itself costs, as measurements of the figures ``ours-...``."""

from pathlib import Path

from diffkv_repro.attention_stats.bench import MemoryCost, TimeCost
from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture
from diffkv_repro.study.records import Measurement, Record, record_path, record_text

STATS_COST = "ours-stats-cost"


def stats_cost(time: TimeCost, memory: MemoryCost) -> dict[str, Measurement]:
    """The measurements of ``ours-stats-cost``."""
    low, high = time.times.spread
    repeats = len(time.times.call)
    return {
        "stats_time_ratio": Measurement(
            time.times.ratio,
            "x a plain prefill",
            repeats,
            f"warm, {repeats} pairs, ratios from {low:.2f} to {high:.2f}",
        ),
        "stats_memory_over_linear": Measurement(
            memory.growth_over_linear, "x linear", 1, "live bytes: freed blocks given back at once"
        ),
    }


def stats_config(time: TimeCost, memory: MemoryCost) -> dict[str, object]:
    """What those measurements depend on."""
    return {
        "model": time.model,
        "timed_tokens": time.tokens,
        "repeats": len(time.times.call),
        "longest_tokens": max(memory.lengths),
    }


def record_stats_cost(folder: Path, time: TimeCost, memory: MemoryCost) -> Path:
    """Keep a measurement made outside a notebook (on a GPU, say) in ``folder``, with its provenance."""
    provenance = capture(root=project_root(), seed=0, profile="gpu", config=stats_config(time, memory))
    record = Record(STATS_COST, provenance.as_dict(), stats_cost(time, memory))
    return write_text(record_path(folder, STATS_COST), record_text(record))
