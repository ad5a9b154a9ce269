"""Winners are those that pass and shrink most; nobody wins where none does; chances come from resampling items."""

import pandas as pd
import pytest

from diffkv_repro.evaluation.profile_tables import (
    best_of,
    chance_of_one_winner,
    grid,
    mean_relative,
    share_won,
    unified,
)

ROWS = [
    ("recall", "a", 5.0, 0.99), ("recall", "b", 3.0, 1.00), ("recall", "c", 9.0, 0.50),
    ("prose", "a", 5.5, 0.90), ("prose", "b", 3.5, 0.98), ("prose", "c", 8.0, 0.96),
    ("copy", "a", 4.0, 0.20), ("copy", "b", 0.9, 1.00), ("copy", "c", 7.0, 0.10),
]  # fmt: skip
SUMMARY = pd.DataFrame(ROWS, columns=["workload", "profile", "ratio", "relative"])


def test_the_best_is_good_enough_and_smaller_than_nothing_done():
    best = best_of(SUMMARY, ["a", "b", "c"], 0.97)
    assert best == {"recall": ("a", 5.0), "prose": ("b", 3.5), "copy": ("none", 1.0)}
    assert share_won(best) == pytest.approx(1 / 3)
    assert best_of(SUMMARY, ["b", "c"], 0.95)["prose"] == ("c", 8.0)
    assert share_won(best_of(SUMMARY, ["c"], 0.05)) == 1
    assert share_won(best_of(SUMMARY, ["c"], 0.999)) == 0


def test_one_profile_for_all_must_pass_everywhere():
    assert unified(SUMMARY, ["a", "b"], 0.97) == ("b", pytest.approx((3 + 3.5 + 0.9) / 3))
    assert unified(SUMMARY, ["a", "c"], 0.97) == ("none", 1.0)


def test_a_grid_keeps_the_order():
    table = grid(SUMMARY, "ratio")
    assert list(table.index) == ["a", "b", "c"]
    assert list(table.columns) == ["recall", "prose", "copy"]
    assert table.loc["c", "prose"] == 8.0


def judged(scores):
    """Rows of workloads -> profiles -> scores of 20 items, all of which the uncompressed model solves."""
    return pd.DataFrame(
        {"workload": workload, "profile": profile, "item": item, "score": score, "plain": 1.0, "ratio": ratio}
        for workload, profiles in scores.items()
        for profile, (ratio, own) in profiles.items()
        for item, score in enumerate(own)
    )


def test_the_chance_that_one_wins_everywhere():
    certain = judged({w: {"a": (5, [1] * 20), "b": (3, [1] * 20)} for w in ("x", "y")})
    assert chance_of_one_winner(certain, [], ["a", "b"], 0.97, resamples=50) == 1
    parted = judged({"x": {"a": (5, [1] * 20), "b": (3, [1] * 20)}, "y": {"a": (5, [0] * 20), "b": (3, [1] * 20)}})
    assert chance_of_one_winner(parted, [], ["a", "b"], 0.97, resamples=50) == 0
    # One wrong answer in 20 is missing from a share (19/20)**20 of the resamples, and then a wins both.
    close = judged({"x": {"a": (5, [1] * 20), "b": (3, [1] * 20)}, "y": {"a": (5, [0] + [1] * 19), "b": (3, [1] * 20)}})
    assert chance_of_one_winner(close, [], ["a", "b"], 0.97) == pytest.approx(0.95**20, abs=0.05)
    # As likelihoods the same scores mean a factor of exp(-1/20): 0.95, and exp(-0) = 1 in the same resamples.
    assert chance_of_one_winner(close, ["x", "y"], ["a", "b"], 0.97) == pytest.approx(0.95**20, abs=0.05)


def test_a_mean_over_workloads_has_an_interval():
    rows = judged({"x": {"a": (5, [1] * 10 + [0] * 10)}, "y": {"a": (5, [1] * 20)}})
    found = mean_relative(rows, [], "a")
    assert found.mean == pytest.approx(0.75)
    # A share of 20 draws from one half has a standard error of 0.11, and half of that counts.
    assert found.low == pytest.approx(0.75 - 1.96 * 0.056, abs=0.03)
    assert found.high == pytest.approx(0.75 + 1.96 * 0.056, abs=0.03)
    likelihood = mean_relative(rows, ["x", "y"], "a")
    assert likelihood.mean == pytest.approx((2.718281828**-0.5 + 1) / 2)
