"""Arithmetic on numbers that KVServe publishes. Each function takes those of one figure, as in ``claims.yaml``."""

from collections.abc import Mapping
from math import prod
from typing import Any

from diffkv_repro.kvserve.pareto import non_dominated


def figure_5(paper: Mapping[str, Any]) -> dict[str, float]:
    """The plotted profiles: how many there are, and that their latencies are computed from ratio and codec alone."""
    plotted = paper["plotted_data"]
    formula, fine = paper["latency_formula"], paper["fine_grid"]
    counted = fine["transforms"] * fine["head_ratios"] * fine["key_level_pairs"] * fine["value_level_pairs"]

    def milliseconds(ratio: float, codec: str) -> float:
        bits = 8 * 2**20 * formula["kv_mib"]
        return 1e3 * bits / ratio / formula["bits_per_second"] + formula["constant_ms"][codec]

    smallest, largest = paper["compression_ratio"]
    return {
        "plotted_minus_counted_fine_grid": paper["plotted_counts"][-1] - counted,
        "computed_latency_at_smallest_ratio_ms": milliseconds(smallest, "bitcomp"),
        "computed_latency_at_largest_ratio_ms": milliseconds(largest, "ans"),
        "transfer_time_understated_percent": 100 * (formula["bits_per_second"] / 100e9 - 1),
        "plotted_profiles": plotted["quantiser_settings"] * len(plotted["codecs"]),
    }


def figure_7(paper: Mapping[str, Any]) -> dict[str, float]:
    """What the paper names and the released code does not hold."""
    return {
        f"named_{what}_absent_from_code": len(set(paper[f"{key}_named"]) - set(paper[f"{key}_in_released_code"]))
        for what, key in (("transforms", "transforms"), ("importance", "importance"))
    }


def table_1(paper: Mapping[str, Any]) -> dict[str, float]:
    """Ceilings of ratios, and what the released evaluation leaves out of them."""
    kivi, example, quarot, dim = paper["kivi"], paper["kivi_ratio_example"], paper["quarot"], 128
    quantised = example["tokens"] - example["residual"]
    stored = quantised * example["bits_per_value"] + 16 * example["residual"]
    payload = paper["raw_bytes_per_token_and_layer"]["smollm2_135m"] / 8
    return {
        "kivi_2_bit_ceiling": 16 / (2 + kivi["metadata_bits_per_value"]),
        "kivi_4_bit_ceiling": 16 / (4 + kivi["metadata_bits_per_value"]),
        "quarot_ratio_head_dim_128": 16 * dim / (quarot["bits"] * dim + quarot["metadata_bits_per_head_vector"]),
        "kivi_ratio_understated_percent": 100 * (1 - (16 * quantised / stored) / (16 * example["tokens"] / stored)),
        "five_document_points_above_100": paper["five_document_result_percent"] - 100,
        "metadata_over_payload_smollm2_percent": 100 * paper["metadata_bytes_per_token_and_layer"] / payload,
    }


def figure_8(paper: Mapping[str, Any]) -> dict[str, float]:
    """How far the published subsets are from the full set."""
    accuracy = dict(zip(paper["subset_percent"], paper["accuracy"], strict=True))
    seconds = dict(zip(paper["subset_percent"], paper["seconds"], strict=True))
    outside = [size for size in accuracy if size > 30 and abs(accuracy[size] - accuracy[100]) > paper["band_points"]]
    return {
        "published_error_of_30_percent_subset": abs(accuracy[30] - accuracy[100]),
        "published_time_share_of_30_percent_subset": 100 * seconds[30] / seconds[100],
        "larger_subsets_outside_band": len(outside),
    }


def figure_9(paper: Mapping[str, Any], candidates: int) -> dict[str, float]:
    """The pool that the published search starts from, the artifact's grid, and the released exploration term."""
    grid = paper["artifact_grid"]
    return {
        "candidates_after_cold_start": candidates - paper["cold_start_points"],
        "artifact_grid_profiles": prod(grid.values()),
        "released_over_stated_exploration_term": sum(paper["artifact"]["ratio_range"]) / 2,
    }


def figure_10(paper: Mapping[str, Any]) -> dict[str, float]:
    """The plotted latencies: one a pipeline and codec, so that within a pipeline they add nothing to the front."""
    latencies = [value for codecs in paper["plotted_latency_ms"].values() for value in codecs.values()]
    quality, ratio = [0.99, 0.98, 0.97, 0.97], [5.0, 6.0, 7.0, 6.5]
    flat, deep = non_dominated(quality, ratio), non_dominated(quality, ratio, [latencies[0]] * 4)
    return {
        "distinct_plotted_latencies": len(set(latencies)),
        "front_profiles_added_by_plotted_latency": int((deep & ~flat).sum()),
    }


def figure_16_left(paper: Mapping[str, Any]) -> dict[str, float]:
    """What the published ablation saves, and what the stated saving counts."""
    steps, saving = paper["iterations"], paper["saving"]
    return {
        "published_iterations_saved_percent": 100 * (1 - steps["full"] / paper["budget"]),
        "saving_with_ablation_iterations": saving["exhaustive_profiles"] / steps["full"],
        "hours_of_full_search": steps["full"] * saving["minutes_per_profile"] / 60,
    }
