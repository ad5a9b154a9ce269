"""What a search thinks with: encodings, acquisition functions and surrogates, and what it does when they fail."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from search_helpers import POOL, QUALITY, REDUCED, SETTINGS, answer_all, some

from diffkv_repro.kvserve.acquisition import constrained_improvement, equation_4, exploration_weight
from diffkv_repro.kvserve.encoding import Pool, describe, one_hot_min_max
from diffkv_repro.kvserve.search import Search, SearchSettings
from diffkv_repro.kvserve.space import SPACES
from diffkv_repro.kvserve.surrogate import SURROGATES


def test_botorch_is_asked_for_each_point_alone():
    import torch

    random = np.random.default_rng(0)
    model = SURROGATES["botorch"]()
    points, values = random.random((20, 3)), random.random(20)
    model.fit(points, values)
    asked = random.random((7, 3))
    mean, deviation = model.predict(asked)
    theirs = model.model.posterior(torch.as_tensor(asked))
    np.testing.assert_allclose(mean, values.mean() + values.std() * theirs.mean[:, 0].detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(deviation, values.std() * theirs.variance[:, 0].sqrt().detach().numpy(), rtol=1e-4)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_an_imagined_answer_makes_sure_and_leaves_the_mean(surrogate):
    random = np.random.default_rng(0)
    model = SURROGATES[surrogate]()
    points = random.random((12, 2))
    model.fit(points, points.sum(axis=1))
    place = np.array([[0.5, 0.5]])
    mean, deviation = model.predict(place)
    model.imagine(place, mean)
    again, less = model.predict(place)
    assert less[0] < deviation[0]
    assert again[0] == pytest.approx(mean[0], abs=1e-2)


def test_equation_4_against_a_naive_twin():
    from scipy.stats import norm

    ratios, mean, deviation = np.array([4.0, 6, 9]), np.array([0.99, 0.97, 0.9]), np.array([0.01, 0.02, 0.05])
    found = equation_4(ratios, mean, deviation, 0.97, 0.5)
    naive = [r * norm.cdf((m - 0.97) / s) + 0.5 * s / 0.05 for r, m, s in zip(ratios, mean, deviation, strict=True)]
    np.testing.assert_allclose(found, naive, rtol=1e-10)
    released = equation_4(ratios, mean, deviation, 0.97, 0.5, released=True, mean_ratio=7.0)
    np.testing.assert_allclose(released - found, 0.5 * deviation / 0.05 * 6.0, rtol=1e-10)


def test_exploration_decays_and_is_halved_after_a_fifth_of_the_budget():
    assert exploration_weight(0, 100) == 1
    assert exploration_weight(20, 100) == pytest.approx(0.99**20)
    assert exploration_weight(21, 100) == pytest.approx(0.99**21 / 2)
    assert exploration_weight(10_000, 100) == 0.05


def test_constrained_improvement_is_botorchs():
    import torch
    from botorch.acquisition.analytic import LogConstrainedExpectedImprovement
    from botorch.utils.testing import MockModel, MockPosterior

    ratios, mean, deviation = np.array([4.0, 6, 9]), np.array([0.99, 0.97, 0.94]), np.array([0.01, 0.02, 0.05])
    ours = constrained_improvement(ratios, mean, deviation, 0.97, 3.5)
    for place in range(3):
        posterior = MockPosterior(
            mean=torch.tensor([[[ratios[place], mean[place]]]], dtype=torch.float64),
            variance=torch.tensor([[[1e-12, deviation[place] ** 2]]], dtype=torch.float64),
        )
        theirs = LogConstrainedExpectedImprovement(
            MockModel(posterior), best_f=3.5, objective_index=0, constraints={1: (0.97, None)}
        )
        assert ours[place] == pytest.approx(float(theirs(torch.zeros(1, 1, 2, dtype=torch.float64))), abs=1e-4)
    none_better = constrained_improvement(ratios, mean, deviation, 0.97, 5.0)
    assert none_better.argmin() == 0


def test_encoding_is_one_hot_and_min_max():
    rows = [describe(profile) for profile in REDUCED]
    points = one_hot_min_max(rows)
    assert points.shape == (216, 2 + 1 + 4)
    assert points.min() == 0
    assert points.max() == 1
    hot = points[:, [column for column in range(7) if set(np.unique(points[:, column])) == {0.0, 1.0}]]
    assert (hot.sum(axis=1) == 1).all()


def test_encoding_of_any_profiles():
    mixed = [*list(SPACES["modules"])[::7], *REDUCED[:3]]
    pool = Pool.of(mixed, np.ones(len(mixed)))
    assert np.isfinite(pool.points).all()
    assert pool.points.min() >= 0
    assert pool.points.max() <= 1
    assert len({tuple(row) for row in pool.points}) == len(mixed)
    assert one_hot_min_max([describe(REDUCED[0])]).shape == (1, 1)


@pytest.mark.parametrize("broken", [["botorch"], ["botorch", "sklearn"]])
def test_a_failing_gaussian_process_never_ends_a_search(monkeypatch, broken):
    def fail(self, points, values):
        raise ArithmeticError("not positive definite")

    for name in broken:
        monkeypatch.setattr(SURROGATES[name], "fit", fail)
    with pytest.warns(UserWarning, match="not positive definite"):
        done = answer_all(Search(POOL, replace(SETTINGS, budget=16)), QUALITY)
    assert done.iterations >= 8
    assert done.best is not None


def test_a_prediction_that_fails_falls_back_too(monkeypatch):
    monkeypatch.setattr(
        SURROGATES["botorch"], "predict", lambda self, points: (_ for _ in ()).throw(ArithmeticError("not finite"))
    )
    with pytest.warns(UserWarning, match="not finite"):
        done = answer_all(Search(POOL, replace(SETTINGS, budget=10)), QUALITY)
    assert done.iterations == 10


@pytest.mark.parametrize("values", [[0.5] * 12, [0.0, 1.0] * 6, [1e-12] * 11 + [1e6]])
def test_hostile_qualities(values):
    pool = some(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = answer_all(
            Search(pool, SearchSettings(min_quality=0.4, budget=12, cold_start=2, prune=False)), np.array(values)
        )
    assert done.iterations >= 2
