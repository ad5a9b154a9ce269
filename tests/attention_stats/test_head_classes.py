"""The induction test: against the model's own score matrices, and on a head that is made to pass it."""

import numpy as np
import pytest
import torch
from tiny import tiny_gemma3, tiny_llama, tiny_qwen2

from diffkv_repro.attention_stats.head_classes import LEAD, repeated_tokens, retrieval_scores, top_heads
from diffkv_repro.models import LoadedModel, attention_layout


def naive(model, input_ids):
    """Scores by the definition, from score matrices that the model computes itself."""
    layout, group = attention_layout(model), attention_layout(model).group
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model.base_model(input_ids=input_ids, output_attentions=True).attentions
    shown = (input_ids.shape[1] - LEAD) // 2
    scores = np.zeros((len(layout.layers), layout.kv_heads))
    for layer, attention in enumerate(attentions):
        for head in range(layout.heads):
            masses = []
            for sequence in attention[:, head].tolist():
                for at in range(shown - 1):
                    row = sequence[LEAD + shown + at]
                    masses.append(row[LEAD + at] + row[LEAD + at + 1])
            scores[layer, head // group] = max(scores[layer, head // group], sum(masses) / len(masses))
    return scores


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_gemma3])
def test_equal_to_the_models_own_scores(build):
    model = build()
    scores = retrieval_scores(model, length=20, sequences=3, seed=4)
    expected = naive(model, repeated_tokens(model, length=20, sequences=3, seed=4))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_a_head_made_to_match_is_found():
    model = tiny_llama(heads=4, kv_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e9})
    assert (retrieval_scores(model, length=40) < 0.2).all()
    attention = model.model.layers[0].self_attn  # where equal tokens are still equal
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[[0, 1, 2, 8, 9, 10]] = 0  # the channels that RoPE turns within so short a text
    with torch.no_grad():
        attention.k_proj.weight[16:] = weight  # KV head 1, whose last query head looks for its own key
        attention.q_proj.weight[48:] = weight
    scores = retrieval_scores(model, length=40)
    assert scores[0, 1] > 0.4, "the other half goes to the token itself"
    assert top_heads(scores, 1 / 6, range(3)) == ((False, True), (False, False), (False, False))


def test_the_sequence_is_shown_twice_and_seeded():
    model = tiny_llama()
    ids = repeated_tokens(model, length=30, sequences=2, seed=1)
    assert ids.shape == (2, LEAD + 60)
    assert torch.equal(ids[:, LEAD : LEAD + 30], ids[:, LEAD + 30 :])
    assert (ids[:, 0] == 1).all(), "BOS"
    for row in ids[:, 1 : LEAD + 30].tolist():
        assert len(set(row)) == len(row), "distinct, so that a match is one"
        assert not {0, 1, 2} & set(row), "no special tokens"
    assert not torch.equal(ids[0], ids[1])
    assert torch.equal(ids, repeated_tokens(model, length=30, sequences=2, seed=1))
    assert not torch.equal(ids, repeated_tokens(model, length=30, sequences=2, seed=2))


def test_the_scores_are_seeded_and_leave_the_model_alone():
    model = tiny_llama()
    before = model.config._attn_implementation
    first, second, other = (retrieval_scores(model, length=16, seed=seed) for seed in (3, 3, 5))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()
    assert model.config._attn_implementation == before
    loaded = LoadedModel("tiny", model, None, attention_layout(model), "float32", "none")
    np.testing.assert_array_equal(retrieval_scores(loaded, length=16, seed=3), first)


def test_length_is_what_the_model_has_room_for():
    assert repeated_tokens(tiny_llama(), length=1000, sequences=1, seed=0).shape[1] == LEAD + 2 * (97 - 3 - LEAD)
    small = tiny_llama(max_position_embeddings=20)
    assert repeated_tokens(small, length=1000, sequences=1, seed=0).shape[1] == LEAD + 2 * 8
    with pytest.raises(ValueError, match="length is 1, and the model has room for 1"):
        retrieval_scores(tiny_llama(), length=1)
    with pytest.raises(ValueError, match="sequences is 0"):
        retrieval_scores(tiny_llama(), sequences=0)


def test_the_top_share_of_heads():
    scores = np.array([[0.1, 0.9], [0.5, 0.5], [0.8, 0.0], [0.2, 0.3]])
    assert top_heads(scores, 0.5, range(4)) == ((False, True), (True, True), (True, False), (False, False))
    assert top_heads(scores, 0.375, range(4))[1] == (True, False), "of equal ones the lower head"
    assert top_heads(scores, 0.5, [0, 2]) == ((False, True), (), (True, False), ())
    assert sum(map(sum, top_heads(scores, 0.0, range(4)))) == 0
    assert sum(map(sum, top_heads(scores, 1.0, range(4)))) == 8
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        top_heads(scores, 1.5, range(4))
