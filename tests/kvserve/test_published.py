"""Published numbers in, published results out; and where they do not follow, by how much."""

from pathlib import Path

import pytest

from diffkv_repro.kvserve import published
from diffkv_repro.kvserve.latency import MeasuredProfile, ServiceContext, transfer_seconds
from diffkv_repro.models import SHAPES
from diffkv_repro.study.claims import load_claims

FIGURES = load_claims(Path(__file__).resolve().parents[2] / "claims.yaml")
SHAPES_OF = {"llama_8b": "llama3.1-8b", "qwen_7b": "qwen2.5-7b", "qwen_32b": "qwen2.5-32b", "llama_70b": "llama3.1-70b",
             "smollm2_135m": "smollm2-135m"}  # fmt: skip


def arithmetic(figure):
    paper = FIGURES[figure].published
    if figure == "kvserve-fig02":
        return published.figure_2(paper, {key: SHAPES[name].kv_bytes_per_token() for key, name in SHAPES_OF.items()})
    return getattr(published, f"figure_{int(figure[-2:])}")(paper)


@pytest.mark.parametrize("figure", ["kvserve-fig01", "kvserve-fig02", "kvserve-fig03", "kvserve-fig04"])
def test_exact_claims_follow_from_the_published_numbers(figure):
    found = arithmetic(figure)
    exact = {claim.metric: claim for claim in FIGURES[figure].claims if claim.metric in found}
    assert set(exact) == set(found)
    for metric, value in found.items():
        assert exact[metric].expectation.holds(value), (metric, value)


def test_the_published_shares_are_those_of_the_times():
    paper = FIGURES["kvserve-fig01"].published
    for name, shares in published.shares_of_figure_1(paper).items():
        assert shares == pytest.approx(paper[f"{name}_share_percent"], abs=0.05)


def test_figure_4_gives_the_published_ratios_speeds_and_crossovers():
    paper = FIGURES["kvserve-fig04"].published
    profiles = published.profiles_of_figure_4(paper)
    for profile in profiles:
        assert profile.ratio == pytest.approx(paper["compression_ratio"][profile.name], abs=0.01)
        assert profile.speed / 1e9 == pytest.approx(paper["speed_gb_s"][profile.name], abs=0.06)
    found = published.crossings(profiles)
    assert found["cachegen", "mixhq"] == pytest.approx(paper["crossover_gbps"]["cachegen_mixhq"], abs=0.05)
    assert found["cachegen", "kivi"] == pytest.approx(paper["crossover_gbps"]["cachegen_kivi"], abs=0.05)


def test_two_profiles_take_equally_long_where_they_cross():
    one, other = MeasuredProfile("small", 8.0, 2e8, 3e8), MeasuredProfile("quick", 3.0, 2e9, 1e9)
    bandwidth = published.crossing(one, other)
    context = ServiceContext("any", 1e8, bandwidth)
    assert transfer_seconds(one, context) == pytest.approx(transfer_seconds(other, context))
    better = MeasuredProfile("better", 9.0, 2e9, 1e9)  # smaller and as quick: never crossed
    assert published.crossing(better, other) == 0
    assert published.crossing(better, one) == 0
