"""Error of quantised keys, with and without the bias of their projection."""

import math

import pytest
import torch
from cache_helpers import ids_of, naive_codec
from tiny import tiny_llama, tiny_qwen2

from diffkv_repro.evaluation.key_error import key_errors
from diffkv_repro.evaluation.teacher_forced import prefill


def biased(size):
    model = tiny_qwen2()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(size * torch.randn(bias.shape, generator=generator))
    return model


def errors(model, bits):
    return key_errors(model, prefill(model, ids_of(24, 2), 20), bits=bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_large_bias_swallows_the_plain_keys(bits):
    table = errors(biased(50), bits)
    assert table.columns.tolist() == ["layer", "plain", "bias_free"]
    assert table["layer"].tolist() == [0, 1, 2]
    assert (table["plain"] > 4 * table["bias_free"]).all()
    assert (table["bias_free"] < 1).all()


def test_without_its_bias_a_key_loses_what_the_key_of_a_model_without_one_loses():
    """In the first layer, whose input no attention has touched."""
    loss = errors(biased(50), 4)["bias_free"][0]
    assert loss == pytest.approx(errors(biased(0), 4)["plain"][0], rel=0.01)


def test_keys_without_a_bias_have_the_plain_error_only():
    model = tiny_llama()
    table = errors(model, 4)
    assert table.columns.tolist() == ["layer", "plain"]
    prompts = prefill(model, ids_of(24, 2), 20).prompts
    for prompt, found in zip(prompts, table["plain"], strict=True):
        squares, wrong = 0.0, 0.0
        for row in prompt.call.key.flatten(0, 2).tolist():
            again = naive_codec(row, 4)
            squares += sum(value**2 for value in row)
            wrong += sum((value - float(other)) ** 2 for value, other in zip(row, again, strict=True))
        assert found == pytest.approx(math.sqrt(wrong / squares), rel=1e-4)


def test_fewer_bits_lose_more():
    model = tiny_llama()
    losses = [errors(model, bits)["plain"].mean() for bits in (1, 2, 4, 8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 10 * losses[3]
