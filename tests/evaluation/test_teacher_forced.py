"""Scores of a text decoded through the cache, against a plain forward call and against sums one by one."""

import dataclasses
import math

import pytest
import torch
from cache_helpers import ids_of
from tiny import tiny_gemma3, tiny_llama

from diffkv_repro.baselines.budgets import AtShare, EqualBudget
from diffkv_repro.cache import FullPrecision, Method, Uniform
from diffkv_repro.cache.layer import FullLayer
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.teacher_forced import NotReadError, continued, prefill, score

POLICY = CompressionPolicy.paper(alpha_high=2, alpha_low=0.5, window=4)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@dataclasses.dataclass(frozen=True)
class Silent(Method):
    """Decodes by its own means and says nothing of having read a cache."""

    label = "silent"

    def layer(self, place, storage):
        class Uncounted(FullLayer):
            def decode(self, call, rows):
                output = super().decode(call, rows)
                self.reads = 0
                return output

        return Uncounted(place)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("prompt", [1, 17, 28])
def test_full_precision_predicts_what_a_plain_forward_call_does(make, prompt):
    model, ids = make(), ids_of(30, 2)
    found, cache = continued(model, prefill(model, ids, prompt), FullPrecision(), "simulated")
    with torch.inference_mode():
        expected = model(ids).logits.log_softmax(dim=-1)
    assert found.shape == (2, 30 - prompt - 1, 97)
    torch.testing.assert_close(found, expected[:, prompt:-1], atol=1e-4, rtol=0)
    assert cache.reads == 3 * (30 - prompt)


@pytest.mark.parametrize("storage", ["simulated", "packed"])
def test_sixteen_bits_add_next_to_nothing(model, storage):
    full, same = score(
        model, ids_of(40, 2), [FullPrecision(), Uniform("K16V16")], prompt_tokens=20, storage=storage
    )  # fmt: skip
    for exact, stored in zip(full, same, strict=True):
        assert (exact.kl, exact.agreement, exact.nominal, exact.true) == (0, 1, 1, 1)
        assert stored.nll == pytest.approx(exact.nll, abs=5e-3)
        assert stored.kl == pytest.approx(0, abs=1e-3)
        assert stored.nominal == 1
        assert stored.predictions == 19


def test_metrics_are_those_of_a_sum_over_tokens(model):
    ids, prompt = ids_of(36, 2), 20
    ((first, second),) = score(model, ids, [Uniform("K2V1")], prompt_tokens=prompt)
    prefilled = prefill(model, ids, prompt)
    found, _ = continued(model, prefilled, Uniform("K2V1"), "simulated")
    full, _ = continued(model, prefilled, FullPrecision(), "simulated")
    for row, scored in enumerate((first, second)):
        nll, kl, same = [], [], []
        for step in range(36 - prompt - 1):
            own, exact = found[row, step].tolist(), full[row, step].tolist()
            nll.append(-own[int(ids[row, prompt + 1 + step])])
            kl.append(sum(math.exp(q) * (q - p) for q, p in zip(exact, own, strict=True)))
            same.append(own.index(max(own)) == exact.index(max(exact)))
        assert scored.predictions == len(nll) == 15
        assert scored.nll == pytest.approx(sum(nll) / 15, abs=1e-5)
        assert scored.kl == pytest.approx(sum(kl) / 15, abs=1e-5)
        assert scored.agreement == pytest.approx(sum(same) / 15)
        assert scored.kl > 0.001


@pytest.mark.parametrize("method", [FullPrecision(), Uniform("K4V2"), POLICY], ids=["full", "uniform", "policy"])
def test_a_text_has_the_same_score_in_a_batch_and_alone(model, method):
    ids = ids_of(44, 3)
    (together,) = score(model, ids, [method], prompt_tokens=30)
    alone = [next(score(model, ids[row : row + 1], [method], prompt_tokens=30))[0] for row in range(3)]
    for one, other in zip(together, alone, strict=True):
        assert (one.nll, one.kl) == (pytest.approx(other.nll, abs=1e-5), pytest.approx(other.kl, abs=1e-5))
        assert one.agreement == other.agreement
    assert sum(together[0].tokens.values()) == sum(sum(one.tokens.values()) for one in alone)
    assert together[0].nominal == pytest.approx(sum(one.nominal for one in alone) / 3)


def test_both_storages_give_the_same_scores(model):
    simulated, packed = (
        next(score(model, ids_of(44, 2), [POLICY], prompt_tokens=30, storage=storage))
        for storage in ("simulated", "packed")
    )
    assert simulated == packed
    assert set(packed[0].tokens) == {"K8V4", "K4V2", "pruned"}
    assert packed[0].nominal < packed[0].true


def test_scores_come_one_method_after_the_other_on_one_prompt(model, monkeypatch):
    prompts = []

    def fitted(self, given):
        prompts.append(given)
        return EqualBudget(keep=0.5, window=4)

    monkeypatch.setattr(AtShare, "fitted_to", fitted)
    methods = [AtShare(EqualBudget(), share, "equal") for share in (0.1, 0.2)]
    results = score(model, ids_of(30), methods, prompt_tokens=20)
    next(results)
    assert len(prompts) == 1
    next(results)
    assert prompts[0] is prompts[1]
    assert len(prompts[0]) == 3


def test_a_method_that_never_read_its_cache_has_no_score(model):
    with pytest.raises(NotReadError, match="silent: only 0 reads of the cache for 10 tokens"):
        list(score(model, ids_of(30), [Silent()], prompt_tokens=20))


@pytest.mark.parametrize("tokens", [-1, 0, 29, 30, 31])
def test_a_prompt_that_leaves_nothing_is_refused(model, tokens):
    with pytest.raises(ValueError, match=f"a prompt of {tokens} of 30 tokens leaves nothing to decode"):
        prefill(model, ids_of(30), tokens)
    with pytest.raises(ValueError, match="leaves nothing to decode"):
        next(score(model, ids_of(30), [POLICY], prompt_tokens=tokens))
