"""Figures of notebook 11: they say who was sooner, and count what they show."""

import numpy as np
import pandas as pd

from diffkv_repro.kvserve.search_facts import Trial
from diffkv_repro.study.plots import search as plots


def trials(until: dict[str, int]) -> dict[str, list[Trial]]:
    curve = (0.8, 0.9, 1.0)
    return {name: [Trial(name, seed, 1.0, 3, n, curve) for seed in range(3)] for name, n in until.items()}


def test_the_title_says_which_rivals_are_sooner():
    figure = plots.ablations(trials({"full": 10, "no stop": 5, "TPE": 8, "random": 30}), ["full", "no stop"], 216)
    assert figure.layout.title.text == "Algorithm 1 is within 1 % after 10 evaluations in the median; TPE is sooner"
    none = plots.ablations(trials({"full": 10, "random": 30}), ["full"], 216)
    assert none.layout.title.text.endswith("no rival is sooner")
    two = plots.ablations(trials({"full": 10, "TPE": 8, "constrained EI": 9}), ["full"], 216)
    assert two.layout.title.text.endswith("TPE and constrained EI are sooner")
    never = plots.ablations(trials({"full": 10, "random": 216}), ["full"], 216)
    assert never.layout.xaxis.ticktext[-1] == "never"
    assert {trace.y[0]: trace.marker.symbol for trace in never.data if trace.mode == "markers"} == {
        "full": "circle", "random": "x",
    }  # fmt: skip


def test_the_front_counts_its_points():
    points = pd.DataFrame({
        "profile": list("abc"), "ratio": [3.0, 2.0, 1.0], "quality": [0.9, 0.99, 0.8], "slower": [2.0, 2.0, 1.0],
        "flat": [True, True, False], "deep": [True, True, True],
    })  # fmt: skip
    figure = plots.front(points)
    assert [trace.name.split(": ")[1] for trace in figure.data] == ["0", "2", "1"]
    assert figure.layout.title.text.startswith("Measured latency keeps 1 profiles")


def test_subsets_draw_the_root_through_the_first_size():
    errors = np.random.default_rng(0).normal(0, 0.01, (2, 3, 50))
    published = {"subset_percent": [5, 10, 100], "accuracy": [80.0, 84.0, 85.0]}
    figure = plots.subsets([4, 9, 16], errors, 100, published, {"a": [1.0, 3.0, 2.0], "b": [2.0, 4.0, 3.0]})
    by_name = {trace.name: trace for trace in figure.data}
    first = 100 * errors[0].std(axis=1)[0]
    np.testing.assert_allclose(by_name["1/√n"].y, first * np.array([1, 2 / 3, 1 / 2]))
    np.testing.assert_allclose(by_name["a"].y, [3.0, 2.0, 1.0])
    np.testing.assert_allclose(by_name["paper, one draw of each share"].y, [5.0, 1.0])
