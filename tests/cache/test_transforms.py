"""Transforms are exact, agree with the model's own keys, and leave the quantiser a smaller range."""

import pytest
import torch
from cache_helpers import ids_of, mask_of, positions_of
from tiny import tiny_llama, tiny_qwen2

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache import Uniform, compress
from diffkv_repro.cache.transforms import BiasFree, Unrotated
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.models import intercept_attention
from diffkv_repro.models.rope import Rope, key_biases


def biased_qwen2(size=10.0, **shape):
    """Large key biases, as trained Qwen2 models have."""
    model = tiny_qwen2(**shape)
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        with torch.no_grad():
            bias.copy_(size * torch.randn(bias.shape, generator=generator))
    return model


def transforms_of(model):
    rope, bias = Rope(model), key_biases(model)[0]
    return {"bias-free": BiasFree(bias, rope), "unrotated": Unrotated(rope)}


POSITIONS = {
    "one sequence": torch.arange(37)[None],
    "left-padded": positions_of(mask_of(37, [37, 20, 1])),
    "beyond the first table": torch.arange(37)[None] * 6 + 30,
    "not from zero": torch.stack([torch.arange(37) + 5, torch.arange(37) + 100]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", ["bias-free", "unrotated"])
def test_back_and_forth_gives_the_keys_again(name, positions):
    transform, at = transforms_of(biased_qwen2())[name], POSITIONS[positions]
    key = torch.randn(len(at), 2, 37, 16, generator=torch.Generator().manual_seed(0))
    again = transform.inverse(transform.forward(key, at), at)
    torch.testing.assert_close(again, key, rtol=1e-5, atol=2e-5)
    assert transform.forward(key, at).dtype == key.dtype


@pytest.mark.parametrize("name", ["bias-free", "unrotated"])
def test_pieces_are_what_the_whole_is(name):
    """Tokens come one by one in generation; the table of rotated biases grows meanwhile."""
    at = torch.stack([torch.arange(700), (torch.arange(700) - 90).clamp_min(0)])
    key = torch.randn(2, 2, 700, 16, generator=torch.Generator().manual_seed(0))
    model = biased_qwen2()
    whole, piecewise = transforms_of(model)[name].forward(key, at), transforms_of(model)[name]
    for start, stop in ((0, 1), (1, 2), (2, 255), (255, 258), (258, 511), (511, 513), (513, 700)):
        part = piecewise.forward(key[:, :, start:stop], at[:, start:stop])
        torch.testing.assert_close(part, whole[:, :, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bias-free", "unrotated"])
def test_no_tokens_are_no_trouble(name):
    transform = transforms_of(biased_qwen2())[name]
    for batch in (1, 2):
        nothing = torch.zeros(batch, 2, 0, 16)
        assert transform.forward(nothing, torch.zeros(batch, 0, dtype=torch.long)).shape == nothing.shape


@pytest.mark.parametrize("lengths", [[23], [23, 9]])
def test_equal_to_keys_of_a_model_without_the_bias_or_the_rotation(lengths):
    """The model's own projections and functions give the keys before RoPE, with and without the bias."""
    model = biased_qwen2(size=3.0)
    mask = mask_of(23, lengths)
    ids, at, shape = ids_of(23, len(lengths)), positions_of(mask), (len(lengths), 23, 2, 16)
    projected, turned = {}, {}

    def watch(call):
        turned[call.layer] = call.key
        return PromptAttention(call, 23 - mask.sum(dim=1)).output()

    handles = [
        layer.self_attn.k_proj.register_forward_hook(
            lambda _module, _inputs, output, index=index: projected.update({index: output.detach()})
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.inference_mode(), intercept_attention(model, watch):
        model(ids, position_ids=at)
    for handle in handles:
        handle.remove()
    rope, biases = Rope(model), key_biases(model)
    for index, key in turned.items():
        plain = projected[index].view(shape).transpose(1, 2)
        without = rope.rotate(plain - biases[index][None, :, None], at)
        torch.testing.assert_close(BiasFree(biases[index], rope).forward(key, at), without, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(Unrotated(rope).forward(key, at), plain, rtol=1e-4, atol=1e-4)


def error_of(model, method, ids, lengths):
    """How far the logits of the last four tokens are from those of the model alone (root of the mean square)."""
    mask = mask_of(ids.shape[1], lengths)
    at = positions_of(mask)

    def run(session=None):
        first = model(ids[:, :-4], attention_mask=mask[:, :-4], position_ids=at[:, :-4], use_cache=True)
        rest = model(
            ids[:, -4:], attention_mask=mask, position_ids=at[:, -4:], past_key_values=first.past_key_values
        ).logits
        assert session is None or session.cache.reads == 12
        return rest

    with torch.inference_mode():
        exact = run()
        with compress(model, method, storage="packed") as session:
            return float((run(session) - exact).square().mean().sqrt())


@pytest.mark.parametrize("lengths", [[60], [60, 31]])
def test_a_large_bias_no_longer_costs_precision(lengths):
    model, ids = biased_qwen2(size=150.0), ids_of(60, len(lengths))
    for plain, free in (
        (Uniform("K4V16"), Uniform("K4V16", bias_free=True)),
        (
            CompressionPolicy(("K4V16",), (0.0,), window=4),
            CompressionPolicy(("K4V16",), (0.0,), window=4, bias_free=True),
        ),
    ):
        with_bias, without = (error_of(model, method, ids, lengths) for method in (plain, free))
        assert without < with_bias / 3


def test_at_full_precision_nothing_changes_but_rounding():
    model, ids = biased_qwen2(size=3.0), ids_of(40, 2)
    assert error_of(model, Uniform("K16V16", bias_free=True), ids, [40, 17]) < 2e-2


@pytest.mark.parametrize(
    "method", [Uniform("K4V4", bias_free=True), CompressionPolicy.paper(bias_free=True)], ids=["uniform", "policy"]
)
def test_models_without_a_bias_are_refused(method):
    with pytest.raises(ValueError, match="the keys of LlamaForCausalLM have no bias"), compress(tiny_llama(), method):
        pass
