"""What compressing a prompt costs, measured on a tiny model."""

import pytest
from tiny import save, tiny_llama

from diffkv_repro.core.timing import PairedTimes
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.bench import CompressionCost, bench_compression
from diffkv_repro.models import load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("tiny") / "model")), device="cpu")


@pytest.mark.parametrize("policy", [CompressionPolicy.paper(window=8), CompressionPolicy.released(window=8)])
def test_both_policies_have_a_share(loaded, policy):
    cost = bench_compression(loaded, policy=policy, tokens=48, repeats=3)
    assert (cost.model, cost.tokens, cost.policy) == ("model", 48, policy.label)
    assert len(cost.times.call) == len(cost.times.baseline) == 3
    assert cost.share > 0
    low, high = cost.times.spread
    assert low <= cost.share <= high


def test_the_share_is_the_median_of_the_pairs():
    cost = CompressionCost("m", 10, "p", PairedTimes((1.0, 3.0, 4.0), (10.0, 10.0, 8.0)))
    assert cost.share == pytest.approx(0.3)
    assert cost.summary() == (
        "m, 10 tokens, p: policy, quantisation and packing take 30.0% of a plain prefill "
        "(median of 3, 10.0% to 50.0%)"
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [2, 257])
def test_lengths_that_do_not_fit_are_named(loaded, tokens):
    with pytest.raises(ValueError, match=f"tokens is {tokens}; allowed are 3 to 256"):
        bench_compression(loaded, policy=CompressionPolicy.paper(), tokens=tokens)


def test_the_whole_context_can_be_timed(loaded):
    assert bench_compression(loaded, policy=CompressionPolicy.paper(), tokens=256, repeats=1).share > 0
