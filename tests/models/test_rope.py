"""Keys are turned exactly as each family turns them, and back."""

import pytest
import torch
from cache_helpers import ids_of
from tiny import COMMON, build, tiny_gemma3, tiny_llama, tiny_qwen2
from transformers import OPTConfig, PhiConfig, Qwen3Config

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.models import UnsupportedAttention, intercept_attention
from diffkv_repro.models.rope import Rope, has_key_bias, key_biases


def scaled(kind, **options):
    return tiny_llama(rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **options})


def tiny_qwen3(**overrides):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return build(Qwen3Config(**(COMMON | shape | overrides)))


def tiny_phi(**overrides):
    return build(PhiConfig(**(COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2} | overrides)))


MODELS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "llama with linear scaling": lambda: scaled("linear", factor=4.0),
    "llama with yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama 3": lambda: scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
}


def keys_of(model, ids, positions):
    """Keys of every layer before RoPE (as the last module before it gives them) and after."""
    before, after, handles = {}, {}, []
    for index, layer in enumerate(model.model.layers):
        module = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)

        def caught(_module, _inputs, output, index=index):
            before[index] = output.detach()

        handles.append(module.register_forward_hook(caught))

    def watch(call):
        after[call.layer] = call.key
        return PromptAttention(call).output()

    with torch.inference_mode(), intercept_attention(model, watch):
        model(ids, position_ids=positions)
    for handle in handles:
        handle.remove()
    batch, tokens = ids.shape
    shaped = {index: key.reshape(batch, tokens, *after[index].shape[1::2]) for index, key in before.items()}
    return [(shaped[index].transpose(1, 2), after[index]) for index in sorted(after)]


POSITIONS = {
    "from zero": torch.arange(29).expand(2, -1),
    "different in each sequence": torch.stack([torch.arange(29), (torch.arange(29) - 11).clamp_min(0)]),
    "far along and with gaps": torch.stack([torch.arange(29) + 220, torch.arange(29) * 8 + 3]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", MODELS)
def test_rotation_is_that_of_the_model_and_back_undoes_it(name, positions):
    model, at = MODELS[name](), POSITIONS[positions]
    rope = Rope(model)
    for plain, turned in keys_of(model, ids_of(29, 2), at):
        torch.testing.assert_close(rope.rotate(plain, at), turned, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rope.rotate(turned, at, back=True), plain, rtol=1e-4, atol=1e-4)


def test_yarn_scales_keys_and_back_takes_the_scale_out():
    model = MODELS["llama with yarn"]()
    assert model.model.rotary_emb.attention_scaling > 1.05
    key, at = torch.randn(1, 2, 5, 16), torch.arange(5)[None]
    turned = Rope(model).rotate(key, at)
    factor = model.model.rotary_emb.attention_scaling
    torch.testing.assert_close(turned.norm(dim=-1), factor * key.norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keys_are_turned_in_float32(dtype):
    model, at = tiny_qwen2().to(dtype), POSITIONS["different in each sequence"]
    rope = Rope(model)
    for plain, turned in keys_of(model, ids_of(29, 2), at):
        seen = rope.rotate(plain, at)
        assert seen.dtype == torch.float32
        torch.testing.assert_close(seen, turned.float(), rtol=2e-2, atol=5e-2)


def test_turning_keys_leaves_a_dynamic_embedding_as_it_was():
    """Some embeddings change with the longest position that they are shown."""
    model = tiny_llama(
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    )
    with torch.inference_mode():
        before = model(ids_of(64)).logits
        Rope(model).rotate(torch.randn(1, 2, 256, 16), torch.arange(256)[None])
        after = model(ids_of(64)).logits
    torch.testing.assert_close(after, before)


def test_key_biases_are_those_of_the_projection():
    model = tiny_qwen2()
    found = key_biases(model)
    assert len(found) == 3
    for bias, layer in zip(found, model.model.layers, strict=True):
        assert torch.equal(bias, layer.self_attn.k_proj.bias.view(2, 16))
    first, ids, at = found[0].clone(), ids_of(7), torch.arange(7)[None]
    (plain, _), *_ = keys_of(model, ids, at)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.zero_()
    (without, _), *_ = keys_of(model, ids, at)
    torch.testing.assert_close(plain - without, first[None, :, None].expand_as(plain), rtol=1e-4, atol=1e-5)


def test_models_without_a_bias_have_none():
    assert key_biases(tiny_llama()) == [None, None, None]
    assert not has_key_bias(tiny_llama())
    assert has_key_bias(tiny_qwen2())
    assert all(bias is not None for bias in key_biases(tiny_llama(attention_bias=True)))


def test_a_bias_of_zero_does_not_count():
    model = tiny_qwen2()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.zero_()
    assert not has_key_bias(model)


def test_keys_that_are_normalised_after_the_bias_are_refused():
    with pytest.raises(UnsupportedAttention, match="layer 0 of Qwen3ForCausalLM normalises its keys after the bias"):
        key_biases(tiny_qwen3(attention_bias=True))
    assert key_biases(tiny_qwen3()) == [None, None, None]


def test_fused_projections_are_refused():
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.qkv_proj = attention.k_proj
    del attention.k_proj
    with pytest.raises(UnsupportedAttention, match="layer 1 of LlamaForCausalLM has no key projection of its own"):
        key_biases(model)


def test_models_without_one_rotary_embedding_are_refused():
    with pytest.raises(UnsupportedAttention, match="sliding-window layers"):
        Rope(tiny_gemma3())
    opt = build(OPTConfig(vocab_size=97, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(UnsupportedAttention, match="OPTForCausalLM has no rotary embedding"):
        Rope(opt)


def test_an_embedding_of_a_part_of_the_channels_is_turned_or_refused():
    """Phi turns half of its channels, in its attention layer."""
    model = tiny_phi(partial_rotary_factor=0.5)
    at = torch.arange(9)[None]
    try:
        rope = Rope(model)
    except UnsupportedAttention:
        return
    key = torch.randn(1, 2, 9, 16)
    turned = rope.rotate(key, at)
    assert turned.shape == key.shape
    torch.testing.assert_close(turned[..., 8:], key[..., 8:])
