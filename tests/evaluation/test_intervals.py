"""Bootstrap intervals: how often they hold the truth, and their edges."""

import numpy as np
import pytest

from diffkv_repro.evaluation.intervals import Interval, mean_interval, ratio_interval


def test_nineteen_in_twenty_intervals_hold_the_mean():
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(300):
        found = mean_interval(rng.normal(3, 2, size=40), seed=seed, resamples=400)
        held += found.low <= 3 <= found.high
    assert 0.89 <= held / 300 <= 0.98


def test_more_texts_narrow_the_interval():
    values = np.random.default_rng(1).normal(size=400)
    few, many = mean_interval(values[:25]), mean_interval(values)
    assert 2.5 < (few.high - few.low) / (many.high - many.low) < 6


def test_the_mean_and_width_are_those_of_the_values():
    values = np.random.default_rng(2).normal(5, 3, size=200)
    found = mean_interval(values)
    error = values.std() / np.sqrt(200)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_constant_values_and_one_value_have_no_width():
    assert mean_interval([0.25] * 7) == Interval(0.25, 0.25, 0.25, 7)
    assert mean_interval([3]) == Interval(3.0, 3.0, 3.0, 1)
    assert ratio_interval([6, 6], [2, 2]) == Interval(3.0, 3.0, 3.0, 2)


def test_the_seed_decides_the_interval_and_not_the_mean():
    values = [1.0, 2.0, 4.0, 8.0, 3.3, 0.1]
    assert mean_interval(values) == mean_interval(values, seed=0)
    first, second = mean_interval(values, resamples=100), mean_interval(values, seed=1, resamples=100)
    assert first.mean == second.mean
    assert first != second


def test_a_ratio_resamples_both_together():
    under = np.random.default_rng(3).uniform(1, 10, size=30)
    tied = ratio_interval(2 * under, under)
    assert (tied.mean, tied.low, tied.high) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))
    over = under + np.random.default_rng(4).normal(size=30)
    found = ratio_interval(over, under)
    assert found.mean == pytest.approx(over.sum() / under.sum())
    assert found.low < found.mean < found.high


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]], 3.0])
def test_values_that_are_no_list_of_numbers_are_refused(values):
    with pytest.raises(ValueError, match="one number a text is needed"):
        mean_interval(values)
    with pytest.raises(ValueError, match="one number a text is needed"):
        ratio_interval(values, values)


def test_ratios_of_different_texts_are_refused():
    with pytest.raises(ValueError, match=r"values have shapes \(2,\) and \(3,\)"):
        ratio_interval([1, 2], [1, 2, 3])


def test_text_for_a_figure_and_for_a_note():
    found = Interval(0.12345, 0.1, 0.2, 12)
    assert str(found) == "0.1235 [0.1, 0.2], n 12"
    assert found.note == "95 % interval 0.1 to 0.2 (bootstrap over 12 texts)"


def test_a_quotient_needs_something_to_divide_by():
    found = ratio_interval([1, 0, 0, 0], [1, 0, 0, 0])  # a third of the resamples holds no 1
    assert (found.mean, found.low, found.high) == (1, 1, 1)
    with pytest.raises(ValueError, match="a mean of 0"):
        ratio_interval([1, 2], [0, 0])
