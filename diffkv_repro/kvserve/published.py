"""Arithmetic on numbers that KVServe publishes. Each function takes those of one figure, as in ``claims.yaml``."""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any

from diffkv_repro.kvserve.envelope_facts import GBPS
from diffkv_repro.kvserve.latency import Envelope, MeasuredProfile
from diffkv_repro.kvserve.pareto import non_dominated


def figure_1(paper: Mapping[str, Any]) -> dict[str, float]:
    """Shares of communication that the published stage times give, and what ten times the bandwidth saves."""
    shares = shares_of_figure_1(paper)
    within = [share for own in shares.values() for share, gbps in zip(own, paper["gbps"], strict=True) if gbps <= 50]
    wire = paper["qasper_ms"]["communication"]
    return {
        "smallest_published_share_percent": min(within),
        "largest_published_share_percent": max(within),
        "published_qasper_communication_reduction": wire[0] / wire[-1],
    }


def shares_of_figure_1(paper: Mapping[str, Any]) -> dict[str, list[float]]:
    """Percent of communication in the completion time, by data set, a number a device."""
    shares = {}
    for name in ("qasper", "wikimqa"):
        stages = paper[f"{name}_ms"]
        columns = zip(stages["prefill"], stages["communication"], stages["decode"], strict=True)
        shares[name] = [100 * wire / (prefill + wire + decode) for prefill, wire, decode in columns]
    return shares


def figure_2(paper: Mapping[str, Any], bytes_per_token: Mapping[str, int]) -> dict[str, float]:
    """KV bytes of a token by model, as counted from the models' shapes, and the size that the introduction states."""
    stated = paper["kv_bytes_per_token"]
    size = paper["llama_3_1_70b_kv"]["tokens"] * bytes_per_token["llama_70b"]
    return {
        "models_with_expected_kv_bytes_per_token": sum(bytes_per_token[name] == stated[name] for name in stated),
        "llama_70b_kv_gib": size / 2**30,
        "llama_70b_kv_gb": size / 1e9,
    }


def figure_3(paper: Mapping[str, Any]) -> dict[str, float]:
    """How many workloads one method wins in the published cells, and how many methods keep the quality everywhere."""
    won = {}
    methods = [name for name in paper["accuracy"] if name != "default"]
    for column in ("accuracy", "compression_ratio"):
        cells = paper[column]
        winners = [max(methods, key=lambda name: cells[name][place]) for place in range(len(paper["workloads"]))]
        won[column] = max(Counter(winners).values())
    exact, least = paper["accuracy"]["default"], paper["quality_threshold_percent"] / 100
    everywhere = [
        name
        for name in methods
        if all(mine >= least * its for mine, its in zip(paper["accuracy"][name], exact, strict=True))
    ]
    return {
        "most_accuracy_columns_won": won["accuracy"],
        "most_ratio_columns_won": won["compression_ratio"],
        "methods_above_threshold_everywhere": len(everywhere),
    }


def profiles_of_figure_4(paper: Mapping[str, Any]) -> list[MeasuredProfile]:
    """The three methods with their published sizes and times (quantizer plus codec)."""
    raw = 1e9 * paper["kv_gb"]
    return [
        MeasuredProfile(
            name, paper["kv_gb"] / size, raw / sum(paper["compress_s"][name]), raw / sum(paper["decompress_s"][name])
        )
        for name, size in paper["compressed_gb"].items()
    ]


def figure_4(paper: Mapping[str, Any]) -> dict[str, float]:
    """Thresholds and crossings that follow from the plotted constants, by equation 5."""
    profiles = {profile.name: profile for profile in profiles_of_figure_4(paper)}
    thresholds = {name: profile.break_even / GBPS for name, profile in profiles.items()}
    text = paper["threshold_gbps_in_text"]
    envelope = Envelope(profiles.values())
    best = [envelope.best(gbps * GBPS).name for gbps in range(1, 351)]
    return {f"{name}_threshold_gbps": value for name, value in thresholds.items()} | {
        "smallest_constant_over_text_threshold": min(thresholds[name] / text[name] for name in text),
        "cachegen_mixhq_crossover_gbps": crossing(profiles["cachegen"], profiles["mixhq"]) / GBPS,
        "bandwidths_where_kivi_is_best": best.count("kivi"),
    }


def crossing(one: MeasuredProfile, other: MeasuredProfile) -> float:
    """The bandwidth, in bytes per second, at which both take equally long by equation 1; 0 where there is none."""
    slope, height = 1 / one.ratio - 1 / other.ratio, other.codec_seconds - one.codec_seconds
    return max(0.0, slope / height) if height else 0.0


def crossings(profiles: list[MeasuredProfile]) -> dict[tuple[str, str], float]:
    """:func:`crossing` of every two, in Gbps, where there is one."""
    found = {(a.name, b.name): crossing(a, b) / GBPS for a, b in combinations(profiles, 2)}
    return {names: gbps for names, gbps in found.items() if gbps > 0}


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
