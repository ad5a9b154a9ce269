"""Arithmetic on the memory that DiffKV publishes: what its percentages become in bytes, and what follows from them.

Each function takes the published numbers of one figure, as ``claims.yaml`` quotes them.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from diffkv_repro.core.precision import Precision

_SCORE_AND_POSITION = 8


def token_bytes(name: str, head_dim: int) -> int:
    """Bytes of one token in one KV head: codes, scales and zero points, score, position (DiffKV section 6)."""
    precision = Precision.parse(name)
    codes = head_dim * (precision.key_bits + precision.value_bits) // 8
    return codes + precision.metadata_bytes() + _SCORE_AND_POSITION


def figure_12(paper: Mapping[str, Any]) -> dict[str, float]:
    """What a token of each tier really occupies, and how far apart the two divisors are over 1024 tokens."""
    dim, full = paper["head_dim"], paper["fp16_bytes_per_token_and_head"]
    length = 1024
    return {
        "k8v4_true_percent": 100 * token_bytes("K8V4", dim) / full,
        "k4v2_true_percent": 100 * token_bytes("K4V2", dim) / full,
        "k4v2_true_percent_head_dim_64": 100 * token_bytes("K4V2", 64) / (4 * 64),
        "mean_threshold_ratio_position_over_length": statistics.fmean(length / i for i in range(1, length + 1)),
    }


def table_1(paper: Mapping[str, Any]) -> dict[str, float]:
    """Headline ratios, and the memory of its cells in bytes of whole pages."""
    smallest, largest = paper["memory_percent_range"]
    cells = paper["cells"]
    kept = largest / paper["nominal_percent"]["K8V4"]  # Qwen2.5-7B: no low tier
    return {
        "ratio_at_largest_memory": 100 / largest,
        "ratio_at_smallest_memory": 100 / smallest,
        "memory_needed_for_upper_headline_percent": 100 / paper["headline_ratio_range"][1],
        "llama3_70b_true_memory_percent": _in_pages(cells["llama3_70b_gsm8k"]["memory_percent"], paper),
        "qwen2_5_32b_true_memory_percent": _in_pages(cells["qwen2_5_32b_math"]["memory_percent"], paper),
        "qwen2_5_7b_true_memory_percent": 100 * kept * _page_share("K8V4", paper, paper["tokens_per_page"]),
        "llama3_8b_true_memory_percent_without_pruning": _in_pages(smallest, paper),
    }


def table_2(paper: Mapping[str, Any]) -> dict[str, float]:
    """What the smallest memory of LongBench implies."""
    smallest = min(paper["memory_percent"].values())
    return {
        "smallest_pruned_share_percent": 100 * (1 - smallest / paper["nominal_percent"]["K4V2"]),
        "ratio_at_smallest_longbench_memory": 100 / smallest,
    }


def table_3(paper: Mapping[str, Any]) -> dict[str, float]:
    """The same for the thinking models, with the scale groups of the accuracy runs."""
    pages = paper["tokens_per_page_accuracy_runs"]
    per_page = {"K8V4": pages["K8V4_groups_1_2"], "K4V2": pages["K4V2_groups_2_4"]}
    sizes = paper["k4v2_token_bytes"]
    aime = [cell for name, cell in paper["cells"].items() if name.endswith("aime24")]
    return {
        "qwq_32b_true_memory_percent": _in_pages(paper["mean_memory_percent"]["qwq_32b"], paper, per_page),
        "r1_distill_qwen_14b_true_memory_percent": _in_pages(
            paper["mean_memory_percent"]["r1_distill_qwen_14b"], paper, per_page
        ),
        "k4v2_bytes_accuracy_over_throughput": sizes["accuracy_runs_groups_2_4"] / sizes["throughput_runs_groups_1_1"],
        "int4_mean_relative_loss_aime24_percent": statistics.fmean(
            100 * (1 - cell["int4"] / cell["fp16"]) for cell in aime
        ),
    }


def figure_15(paper: Mapping[str, Any]) -> dict[str, float]:
    """What scores cost beside the codes, and what a byte model allows end to end.

    The model: time goes as bytes, the weights are read once, and so is the KV cache, or once for each query head of a
    KV head by both kernels (rereads).
    """
    model, sizes, scores = paper["byte_model"], paper["end_to_end"], paper["released_code_score_bytes"]
    queries = model["queries_per_kv_head"]["llama3_8b"]
    traffic = scores["per_query_head"] * queries + scores["per_kv_head"]

    def gain(name: str, *, reads: int = 1) -> float:
        weights = model["weight_bytes_per_parameter"] * 1e9 * model["parameters_billion"][name]
        cache = reads * sizes["batch"] * sizes["length"] * model["kv_bytes_per_token"][name]
        return (weights + cache) / (weights + model["kv_kept"] * cache)

    return {
        "score_traffic_over_k4v2_read_percent": 100 * traffic / paper["bytes_read_per_token"]["K4V2"],
        "largest_end_to_end_ceiling": max(gain(name) for name in model["parameters_billion"]),
        "end_to_end_ceiling_with_rereads": gain("llama3_8b", reads=queries),
    }


def figure_16(paper: Mapping[str, Any], prompt: int) -> dict[str, float]:
    """How much less a latency is when it is divided by prompt and output tokens, for a prompt of so many tokens."""
    output = paper["released_script"]["output_tokens"]
    return {"latency_understated_percent": 100 * prompt / (prompt + output)}


def figure_17(paper: Mapping[str, Any]) -> dict[str, float]:
    """What the batch of QwQ-32B shows: more than its memory explains, and the cap of the released script."""
    batch, script = paper["qwq_32b_batch"], paper["released_script"]
    pool = 1e9 * paper["gpus"]["qwq_32b"] * paper["gpu_memory_gb"] * script["gpu_memory_fraction"]
    request = paper["largest_generation"]["qwq_32b"] * paper["qwq_32b_kv_bytes_per_token"]
    return {
        "batch_gain_over_inverse_memory": batch["diffkv"] / batch["vllm"] * paper["qwq_32b_memory_percent"] / 100,
        "batch_over_script_cap_percent": 100 * batch["diffkv"] / script["batch_caps"]["qwq_32b"],
        "full_fp16_requests_that_fit": (pool - 1e9 * paper["qwq_32b_weights_gb"]) / request,
        "script_sequences_over_stated_percent": 100 * script["sequences"] / paper["sequences"],
    }


def _in_pages(percent: float, paper: Mapping[str, Any], per_page: Mapping[str, int] | None = None) -> float:
    """A nominal memory in % as bytes of whole pages, with nothing pruned: it then fixes the share of each tier."""
    per_page = per_page or paper["tokens_per_page"]
    high, low = paper["nominal_percent"]["K8V4"], paper["nominal_percent"]["K4V2"]
    share = (percent - low) / (high - low)
    pages = [_page_share(name, paper, per_page) for name in ("K8V4", "K4V2")]
    return 100 * (share * pages[0] + (1 - share) * pages[1])


def _page_share(name: str, paper: Mapping[str, Any], per_page: Mapping[str, int]) -> float:
    """Bytes of a page over those of the tokens it holds in FP16."""
    return paper["page_bytes"] / per_page[name] / paper["fp16_bytes_per_token_and_head"]
