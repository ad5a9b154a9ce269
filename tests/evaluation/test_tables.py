"""Numbers of figures and tables from rows made by hand."""

import pandas as pd
import pytest

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.generation import TaskResult
from diffkv_repro.evaluation.tables import (
    best_within,
    closest_agreement,
    dominating,
    fractions,
    memory_outside_window,
    nearest,
    points,
    table_1,
    table_2,
    table_3,
)

POLICY = CompressionPolicy.paper(window=64)


def rows_of(methods):
    """``methods``: name -> (true, losses of windows, agreements of windows)."""
    return pd.DataFrame(
        {"text": "prose" if index == 0 else "code", "window": f"w{index}", "method": name, "added_nll": loss,
         "agreement": agreement, "true": true, "nominal": true / 2}
        for name, (true, losses, agreements) in methods.items()
        for index, (loss, agreement) in enumerate(zip(losses, agreements, strict=True))
    )  # fmt: skip


ROWS = rows_of({
    "K8V8": (0.55, [0.00, 0.02], [0.99, 0.97]),
    "a": (0.30, [0.04, 0.06], [0.96, 0.98]),
    "b": (0.20, [0.10, 0.30], [0.90, 0.80]),
    "c": (0.40, [0.03, 0.05], [0.95, 0.97]),
})  # fmt: skip


def table_of(**methods):
    """name -> (true, added_nll)"""
    return pd.DataFrame(
        {"method": name, "true": true, "added_nll": loss} for name, (true, loss) in methods.items()
    )  # fmt: skip


def counted(policy, **kinds):
    """Rows of ``policy`` with tokens by tier, a list of windows for each kind of text."""
    return pd.DataFrame(
        {"text": kind, "method": policy.label, "tokens": tokens} for kind, found in kinds.items() for tokens in found
    )


def test_points_are_means_with_their_intervals():
    table = points(ROWS).set_index("method")
    assert table.index.tolist() == ["K8V8", "a", "b", "c"]
    row = table.loc["b"]
    assert (row["true"], row["nominal"]) == (0.2, 0.1)
    assert row["added_nll"] == pytest.approx(0.2)
    assert row["agreement"] == pytest.approx(0.85)
    assert (row["low"], row["high"]) == (pytest.approx(0.1), pytest.approx(0.3))


def test_a_method_dominates_with_fewer_bytes_and_less_loss():
    table = table_of(
        own1=(0.2, 0.3), own2=(0.4, 0.1), poor=(0.5, 0.9),
        smaller=(0.1, 0.2), between=(0.3, 0.2), better=(0.39, 0.05), worse=(0.6, 0.2), equal=(0.2, 0.3),
        over_poor_alone=(0.45, 0.5),
    )  # fmt: skip
    others = ["smaller", "between", "better", "worse", "equal", "over_poor_alone"]
    assert dominating(table, ["own1", "own2", "poor"], others) == ["smaller", "better"]
    assert dominating(table, ["poor"], others) == ["smaller", "between", "better", "equal", "over_poor_alone"]


def test_the_nearest_is_that_of_the_nearest_bytes():
    table = table_of(small=(0.2, 1), middle=(0.3, 1), large=(0.5, 1), other=(0.44, 1))
    assert nearest(table, "other", ["small", "middle", "large"]) == "large"
    assert nearest(table, "other", ["small", "middle"]) == "middle"


def test_the_best_within_a_bound():
    table = table_of(small=(0.2, 0.3), middle=(0.3, 0.08), large=(0.5, 0.02), stranger=(0.1, 0.0))
    own = ["small", "middle", "large"]
    assert best_within(table, own, loss=0.1) == "middle"
    assert best_within(table, own, loss=0.02) == "large"
    assert best_within(table, own, loss=1) == "small"
    assert best_within(table, own, loss=0.001) == "large", "none is within: the nearest"
    assert best_within(table, own, true=0.4) == "middle"
    assert best_within(table, own, true=0.5) == "large"
    assert best_within(table, own, true=0.1) == "small", "none is within: the nearest"
    for bounds in ({}, {"loss": 0.1, "true": 0.1}):
        with pytest.raises(ValueError, match="give either a loss or a share of true bytes"):
            best_within(table, own, **bounds)


def test_the_closest_agreement_is_paired_with_the_reference():
    found = closest_agreement(ROWS, ["a", "b", "c"], true=0.35)
    assert found.points == pytest.approx(100 * ((0.99 - 0.96) + (0.97 - 0.98)) / 2)
    assert found.note == "a at 30.0%; 95 % interval -1.00 to 3.00 points"
    assert closest_agreement(ROWS, ["a", "b", "c"], true=0.3).note.startswith("a at"), "the bound itself is within"
    assert closest_agreement(ROWS, ["a", "b", "c"], true=0.25).points == pytest.approx(13)


def test_no_setting_so_small_costs_all_points():
    found = closest_agreement(ROWS, ["a", "c"], true=0.25)
    assert found == (100.0, "no setting is within 25% of FP16; the smallest is 30.0%")


def test_fractions_are_means_of_shares_by_kind_of_text():
    rows = counted(
        POLICY,
        prose=[{"K8V4": 30, "K4V2": 50, "pruned": 20}, {"K8V4": 500, "K4V2": 500, "pruned": 0}],
        code=[{"K8V4": 10, "pruned": 0}],
    )
    other = counted(CompressionPolicy.paper(alpha_high=2), prose=[{"K8V4": 1}])
    table = fractions(pd.concat([rows, other]), POLICY)
    assert table.loc["prose"].to_dict() == {"high": pytest.approx(40), "low": pytest.approx(50), "pruned": 10}
    assert table.loc["code"].to_dict() == {"high": 100, "low": 0, "pruned": 0}
    assert table.sum(axis=1).tolist() == [pytest.approx(100), 100]


def test_memory_outside_the_window():
    """640 tokens, 64 of them recent and high: 20 of 90 others at 37.5 %, 50 at 18.75 %, 20 gone."""
    prose = {"K8V4": 30, "K4V2": 50, "pruned": 20}
    assert memory_outside_window(counted(POLICY, prose=[prose]), POLICY, 640) == pytest.approx(18.75)
    both = counted(POLICY, prose=[prose], code=[{"K8V4": 100, "pruned": 0}])
    assert memory_outside_window(both, POLICY, 640) == pytest.approx((18.75 + 37.5) / 2)


def answers(*right):
    return [TaskResult(correct, "", 10, 0.5, 0.6, 3) for correct in right]


def test_table_1_in_words():
    table = table_1(ROWS, {"a": answers(True, True, False, False), "b": answers(False)})
    assert table.index.tolist() == ["a", "b"]
    row = table.loc["a"]
    assert (row["prose, nats"], row["code, nats"]) == ("+0.040", "+0.060")
    assert (row["agreement"], row["nominal"], row["true"]) == ("0.970", "15.0%", "30.0%")
    assert row["recall"].startswith("0.50 [0.")
    assert table.loc["b", "recall"] == "0.00 [0.00, 0.00]"


def test_table_2_in_words():
    table = table_2(ROWS)
    assert table.loc["a"].to_dict() == {
        "added nats": "+0.050 [+0.040, +0.060]", "agreement": "0.970", "n": 2, "nominal": "15.0%", "true": "30.0%",
    }  # fmt: skip


def test_table_3_in_words():
    ran = pd.DataFrame(
        {"window": f"w{index}", "method": name, "agreed": agreed, "nominal": 0.25, "true": 0.3}
        for name, found in (("FP16", (8, 8)), ("a", (2, 6)))
        for index, agreed in enumerate(found)
    )
    table = table_3(ran)
    assert table.loc["FP16", "tokens agreed"] == "8.0 [8.0, 8.0]"
    assert table.loc["a"].to_dict() == {"tokens agreed": "4.0 [2.0, 6.0]", "n": 2, "nominal": "25.0%", "true": "30.0%"}
