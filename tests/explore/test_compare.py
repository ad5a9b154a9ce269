"""Two ways to keep one prompt, and the texts that come of them."""

import pytest
import torch
from explore_helpers import PROFILES, WORDS

from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.explore import decide, decision_table, generate, observe, outcome_of, parting
from diffkv_repro.explore.compare import CHOICES, choice_named, texts_side_by_side
from diffkv_repro.kvserve import Profile


@pytest.fixture
def statistics(loaded):
    return observe(loaded, WORDS, observed=6, limit=70)


def test_every_choice_has_an_outcome(statistics):
    for name in CHOICES:
        outcome = outcome_of(statistics, choice_named(name))
        assert 0 < outcome.size.true_ratio < 2, name
        assert len(outcome.errors) == 3, name
        assert all(0 <= error < 3 for error in outcome.errors), name
        assert 0 <= outcome.agreement <= 1, name


@pytest.mark.parametrize(
    "how", [FullPrecision(), Uniform("K16V16"), Profile.named("none"), Profile.named("lossless-ans")]
)
def test_what_loses_nothing_writes_what_the_model_writes(loaded, statistics, how):
    ids = statistics.prefilled.input_ids[:, :65]
    with torch.inference_mode():
        written = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=7, pad_token_id=0
        )[0, 65:].tolist()  # fmt: skip
    assert generate(statistics, how, 7) == written
    assert max(outcome_of(statistics, how).errors) < 2e-3


def test_a_policy_writes_what_generate_writes_through_its_cache(loaded, statistics):
    """The same tokens as transformers' own loop, held back by the one token that is known."""
    policy = CompressionPolicy.paper("K4V2-K2V2", alpha_high=3, alpha_low=0.5, window=5)
    ids = statistics.prefilled.input_ids[:, :65]
    with torch.inference_mode(), compress(loaded.model, policy, storage="packed") as session:
        cache = session.new_cache()
        cache.admit(statistics.prompts, statistics.rows)
        written = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache.hf, do_sample=False, max_new_tokens=7,
            pad_token_id=0,
        )[0, 65:].tolist()  # fmt: skip
    assert generate(statistics, policy, 7) == written


@pytest.mark.parametrize(
    ("left", "right", "at"), [([1, 2], [1, 2], None), ([], [1], None), ([1, 2], [1, 3], 1), ([4], [5, 6], 0)]
)
def test_where_texts_part(statistics, left, right, at):
    assert parting(left, right) == at
    shown = texts_side_by_side(statistics, [3 + i for i in left], [3 + i for i in right])
    assert ("do not part" in shown) == (at is None)


def test_every_profile_has_a_reason():
    for gbps in (0.01, 1, 10, 1000):
        for quality in (0, 0.95, 1.1):
            for slo in (1, 200, float("inf")):
                decision = decide(PROFILES, gbps, min_quality=quality, slo_ms=slo)
                table = decision_table(PROFILES, decision)
                assert list(table.index) == ["none", *(one.name for one in PROFILES)]
                assert all(table["why"])
                assert [name for name, why in table["why"].items() if why.startswith("chosen")] == [
                    decision.profile.name
                ]
