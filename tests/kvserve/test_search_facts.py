"""What notebook 11 measures, on a pool whose qualities follow a rule."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from search_helpers import REDUCED, quality_of, ratio_of, reduced_pool

from diffkv_repro.kvserve import published
from diffkv_repro.kvserve import search_facts as facts
from diffkv_repro.kvserve.exhaustive import Exhaustive
from diffkv_repro.kvserve.search import SearchSettings
from diffkv_repro.kvserve.space import SPACES

CLAIMS = yaml.safe_load((Path(__file__).resolve().parents[2] / "claims.yaml").read_text())["figures"]
RATIOS = np.array([ratio_of(profile) for profile in REDUCED])
QUALITY = np.array([quality_of(profile) for profile in REDUCED])
LEAST = float(np.quantile(QUALITY, 0.8))
SETTINGS = SearchSettings(min_quality=LEAST, budget=12, cold_start=5)


def table() -> Exhaustive:
    return Exhaustive(
        "reduced", SPACES["reduced"].ids, ("a", "b"), *(np.repeat(column[:, None], 2, axis=1) for column in
        (-np.log(QUALITY), np.ones(216), RATIOS)),
    )  # fmt: skip


def test_trials_are_judged_by_the_true_best():
    done = facts.compare(["full", "random"], REDUCED, RATIOS, QUALITY, SETTINGS, seeds=2, workers=1)
    assert [(own.arm, own.seed) for own in done] == [("full", 0), ("full", 1), ("random", 0), ("random", 1)]
    for own in done:
        assert len(own.curve) == own.evaluations <= 12
        assert list(own.curve) == sorted(own.curve)
        assert own.found == own.curve[-1] <= 1
        first = next((place for place, found in enumerate(own.curve, 1) if found >= 0.99), 216)
        assert own.until == first
    with pytest.raises(ValueError, match="no candidate has a quality of 2"):
        facts.compare(["full"], REDUCED, RATIOS, QUALITY, SearchSettings(min_quality=2), seeds=1)


def test_processes_give_the_same_trials():
    alone = facts.compare(["random"], REDUCED, RATIOS, QUALITY, SETTINGS, seeds=50, workers=1)
    assert facts.compare(["random"], REDUCED, RATIOS, QUALITY, SETTINGS, seeds=50, workers=2) == alone


def made(arm, found, until):
    return [facts.Trial(arm, 0, found, 50, until, (found,))]


def test_within_and_dominating():
    trials = {
        "full": made("full", 0.99, 30), "more": made("more", 1.0, 40), "fewer": made("fewer", 0.9, 20),
        "same": made("same", 0.99, 30), "both": made("both", 1.0, 30),
    }  # fmt: skip
    others = ["more", "fewer", "same", "both"]
    assert facts.within(trials) == {"full": 1, "more": 1, "fewer": 0, "same": 1, "both": 1}
    assert facts.dominate_full(trials, others) == ["both"]


def test_extrapolation_meets_a_rule_that_it_was_not_shown():
    found = facts.extrapolate(table(), SPACES["fine"])
    assert len(found.profiles) == 7938
    inside = [
        place for place, own in enumerate(found.profiles) if min(own.quantizer.key_low, own.quantizer.value_low) > 4
    ]
    true_ratio = np.array([ratio_of(found.profiles[place]) for place in inside])
    assert np.std(found.ratios[inside] / true_ratio - 1) < 0.02
    true = np.array([quality_of(found.profiles[place]) for place in inside])
    assert np.corrcoef(found.quality[inside], true)[0, 1] > 0.9
    assert 0.001 < found.quality_error < 0.02
    again = facts.extrapolate(table(), SPACES["fine"])
    np.testing.assert_array_equal(found.quality, again.quality)


def test_errors_of_samples_fall_as_the_root():
    random = np.random.default_rng(0)
    values = random.normal(0, 1, 400)
    sizes = [4, 8, 16, 32, 64]
    errors = facts.sampling_errors(values, ["a", "b"] * 200, sizes, seeds=300)
    assert errors.shape == (2, 5, 300)
    assert facts.log_slope(sizes, errors[0].std(axis=1)) == pytest.approx(-0.5, abs=0.1)
    assert facts.log_slope([1, 4, 16], [8, 4, 2]) == pytest.approx(-0.5)


def test_ranks():
    same = np.array([[3.0, 4, 5], [2, 3, 4], [1, 2, 3]])
    assert facts.rank_stability(same) == (pytest.approx(1.0), 0)
    crossing = np.array([[3.0, 4, 2], [2, 3, 2.5], [1, 2, 1]])
    tau, crossed = facts.rank_stability(crossing)
    assert crossed == 1
    assert tau == pytest.approx((1 + 1 + 1 / 3) / 3)


def test_a_stopped_search_goes_on_alike(tmp_path):
    assert facts.steps_that_differ(REDUCED, reduced_pool(), QUALITY, SETTINGS, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_slow_proposals_are_counted():
    slow, largest = facts.slow_proposals(50, 5, 2, seconds=1e-6)
    assert slow == 2
    assert largest > 1
    assert facts.slow_proposals(50, 5, 2, seconds=600.0)[0] == 0


def test_published_numbers():
    fig08 = published.figure_8(CLAIMS["kvserve-fig08"]["published"])
    assert fig08["larger_subsets_outside_band"] == 2
    assert fig08["published_error_of_30_percent_subset"] == pytest.approx(0.05)
    fig09 = published.figure_9(CLAIMS["kvserve-fig09"]["published"], len(SPACES["headwise"]))
    assert fig09["candidates_after_cold_start"] == 3966
    assert fig09["artifact_grid_profiles"] == len(SPACES["artifact"]) == 144
    assert fig09["released_over_stated_exploration_term"] == pytest.approx(9.045)
    assert published.figure_10(CLAIMS["kvserve-fig10"]["published"]) == {
        "distinct_plotted_latencies": 6, "front_profiles_added_by_plotted_latency": 0,
    }  # fmt: skip
    fig16 = published.figure_16_left(CLAIMS["kvserve-fig16"]["published"])
    assert fig16["published_iterations_saved_percent"] == pytest.approx(35.333, abs=1e-3)
    assert fig16["hours_of_full_search"] == 48.5


@pytest.mark.parametrize("column", ["added_nll", "ratio"])
def test_tables_with_holes_are_refused(column):
    good = table()
    values = {name: getattr(good, name).copy() for name in ("added_nll", "agreement", "ratio")}
    values[column][3, 1] = np.nan
    with pytest.raises(ValueError, match=column):
        Exhaustive("reduced", good.ids, good.sources, **values)
