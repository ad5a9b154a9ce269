"""Optimised gates close where nothing far is used, stay open where it is, and are kept like any head scores."""

import pytest
import torch
from tiny import save, tiny_gemma3, tiny_llama

from diffkv_repro.kvserve import HeadScores, score_heads
from diffkv_repro.kvserve.gates import _hidden, optimise_gates
from diffkv_repro.kvserve.ladders import assign
from diffkv_repro.models import UnsupportedAttention, load_model

SIZES = {"length": 40, "sink": 2, "recent": 6}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model that throws away what KV head 1 of every layer finds."""
    model = tiny_llama(heads=6, kv_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 3 * 16 :] = 0  # query heads 3 to 5
            layer.self_attn.o_proj.weight[:, : 3 * 16] *= 20
    return load_model(str(save(model, tmp_path_factory.mktemp("tiny"))), device="cpu")


@pytest.fixture(scope="module")
def gates(loaded):
    return optimise_gates(loaded, steps=60, rate=0.05, **SIZES)


def test_open_gates_are_full_attention_and_closed_ones_see_only_what_is_near(loaded):
    ids = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    opened, closed = torch.ones(3, 2), torch.zeros(3, 2)
    with torch.no_grad():
        full = loaded.model.model(ids).last_hidden_state
        torch.testing.assert_close(_hidden(loaded, ids, None, 2, 6), full, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(_hidden(loaded, ids, opened, 2, 6), full, rtol=1e-4, atol=1e-4)
        near = _hidden(loaded, ids, closed, 2, 6)
        torch.testing.assert_close(near[:, :8], full[:, :8], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(near[:, -1], full[:, -1], atol=1e-2)
        torch.testing.assert_close(_hidden(loaded, ids, closed, 2, 30), full, rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_matter_close_and_others_stay_open(gates):
    scores = gates.tensor
    assert bool((scores[:, 1] == 0).all())
    assert float(scores[:, 0].min()) > 0.3
    assert bool(((scores >= 0) & (scores <= 1)).all())


def test_the_training_free_scorer_knows_less(loaded, gates):
    """It looks at keys and queries alone, so it cannot see what the model does with a head's output."""
    text = " ".join(f"w{index * 7 % 90 + 3}" for index in range(40))
    free = score_heads(loaded, [text], span=40)
    assert gates.method == "gates"
    assert free.method == "mean-attention"
    half = (0.5, 0.5)
    by_gates, by_free = (assign(scores.tensor.flatten(), half).view(3, 2) for scores in (gates, free))
    assert by_gates.tolist() == [[0, 1]] * 3  # the half that is kept: head 0 of every layer
    assert by_free.tolist() != by_gates.tolist()


def test_gates_come_with_where_they_are_from_and_the_same_again(loaded, gates, tmp_path):
    assert HeadScores.load(gates.save(tmp_path / "gates.json")) == gates
    assert gates.settings["steps"] == 60
    assert gates.fingerprint == loaded.fingerprint
    assert "commit" in gates.provenance
    before = [parameter.requires_grad for parameter in loaded.model.parameters()]
    few = [optimise_gates(loaded, steps=3, **SIZES).scores for _ in range(2)]
    assert few[0] == few[1]
    assert [parameter.requires_grad for parameter in loaded.model.parameters()] == before


def test_what_cannot_be_optimised_is_refused(loaded, tmp_path):
    with pytest.raises(ValueError, match="nothing is far"):
        optimise_gates(loaded, length=8, sink=2, recent=6)
    with pytest.raises(ValueError, match="steps is 0"):
        optimise_gates(loaded, steps=0)
    with pytest.raises(UnsupportedAttention, match="sliding window"):
        optimise_gates(load_model(str(save(tiny_gemma3(), tmp_path)), device="cpu"), **SIZES)
