"""Arithmetic on published memory, against the same done by hand."""

from pathlib import Path

import pytest
import yaml

from diffkv_repro.diffkv import published

ENTRIES = yaml.safe_load((Path(__file__).parents[2] / "claims.yaml").read_text(encoding="utf-8"))["figures"]
FUNCTIONS = {
    "diffkv-fig12": published.figure_12,
    "diffkv-fig15": published.figure_15,
    "diffkv-tab1": published.table_1,
    "diffkv-tab2": published.table_2,
    "diffkv-tab3": published.table_3,
}
# A page of 6784 bytes over the FP16 bytes of the 32, 60 or (with scale groups) 52 tokens in it.
HIGH, LOW, LOW_GROUPS = 6784 / (32 * 512), 6784 / (60 * 512), 6784 / (52 * 512)


def found(figure):
    return FUNCTIONS[figure](ENTRIES[figure]["published"])


def pages(percent, low=LOW):
    """With s high and 1 - s low tokens, 37.5 s + 18.75 (1 - s) is the nominal percentage."""
    share = percent / 18.75 - 1
    return 100 * (share * HIGH + (1 - share) * low)


@pytest.mark.parametrize(
    ("name", "head_dim", "size"),
    [
        ("K8V4", 128, 128 + 64 + 8 + 8), ("K4V2", 128, 64 + 32 + 8 + 8), ("K4V2", 64, 32 + 16 + 8 + 8),
        ("K16V16", 128, 512 + 8), ("K4V2:2/4", 128, 64 + 32 + 24 + 8),
    ],
)  # fmt: skip
def test_bytes_of_a_token(name, head_dim, size):
    assert published.token_bytes(name, head_dim) == size


def test_figure_12():
    harmonic = sum(1 / i for i in range(1, 1025))
    assert found("diffkv-fig12") == pytest.approx({
        "k8v4_true_percent": 100 * 208 / 512,
        "k4v2_true_percent": 100 * 112 / 512,
        "k4v2_true_percent_head_dim_64": 100 * 64 / 256,
        "mean_threshold_ratio_position_over_length": harmonic,
    })  # fmt: skip


def test_figure_15():
    weights, cache = 16.06e9, 8 * 4096 * 131072
    assert found("diffkv-fig15") == pytest.approx({
        "score_traffic_over_k4v2_read_percent": 100 * 40 / 104,
        "largest_end_to_end_ceiling": (weights + cache) / (weights + cache / 4),
        "end_to_end_ceiling_with_rereads": (weights + 4 * cache) / (weights + cache),
    })  # fmt: skip


def test_table_1():
    assert found("diffkv-tab1") == pytest.approx({
        "ratio_at_largest_memory": 100 / 36.7,
        "ratio_at_smallest_memory": 100 / 19.3,
        "memory_needed_for_upper_headline_percent": 100 / 5.7,
        "llama3_70b_true_memory_percent": pages(21.6),
        "qwen2_5_32b_true_memory_percent": pages(25.3),
        "qwen2_5_7b_true_memory_percent": 36.7 / 37.5 * 100 * HIGH,
        "llama3_8b_true_memory_percent_without_pruning": pages(19.3),
    })  # fmt: skip


def test_table_2():
    assert found("diffkv-tab2") == pytest.approx({
        "smallest_pruned_share_percent": 100 - 100 * 14.9 / 18.75,
        "ratio_at_smallest_longbench_memory": 100 / 14.9,
    })  # fmt: skip


def test_table_3():
    losses = [1 - 64.3 / 75.5, 1 - 42.3 / 51.0, 1 - 61.6 / 67.0]
    assert found("diffkv-tab3") == pytest.approx({
        "qwq_32b_true_memory_percent": pages(27.4, LOW_GROUPS),
        "r1_distill_qwen_14b_true_memory_percent": pages(29.4, LOW_GROUPS),
        "k4v2_bytes_accuracy_over_throughput": 128 / 112,
        "int4_mean_relative_loss_aime24_percent": 100 * sum(losses) / 3,
    })  # fmt: skip


@pytest.mark.parametrize("figure", FUNCTIONS)
def test_every_number_has_a_claim_and_meets_it(figure):
    values = found(figure)
    claims = {claim["metric"]: claim for claim in ENTRIES[figure]["claims"] if claim["metric"] in values}
    assert set(claims) == set(values)
    for name, claim in claims.items():
        assert values[name] == pytest.approx(claim["expected"], abs=claim["tolerance"]), name


def test_all_high_and_all_low_are_the_pages_themselves():
    paper = ENTRIES["diffkv-tab1"]["published"]
    assert published._in_pages(37.5, paper) == pytest.approx(100 * HIGH)
    assert published._in_pages(18.75, paper) == pytest.approx(100 * LOW)
