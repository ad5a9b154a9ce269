"""The adapter finds the layout, refuses what it cannot handle with a reason, and leaves no trace."""

import copy

import pytest
import torch
from tiny import COMMON, build, save, tiny_gemma3, tiny_llama, tiny_qwen2
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    DeepseekV2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from diffkv_repro.attention_stats import collect
from diffkv_repro.models import LayerAttention, UnsupportedAttention, attention_layout, intercept_attention, load_model

IDS = torch.arange(3, 20)[None]


def test_layout_of_full_and_sliding_layers():
    layout = attention_layout(tiny_gemma3(window=9))
    assert layout.layers == (LayerAttention("sliding", 9), LayerAttention("full"), LayerAttention("sliding", 9))
    assert str(layout) == "1 full + 2 sliding (9) layers, 4/1 heads, head_dim 32"
    assert attention_layout(tiny_qwen2()).group == 7
    mistral = build(MistralConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, sliding_window=8))
    assert set(attention_layout(mistral).layers) == {LayerAttention("sliding", 8)}


def state_of(model):
    return copy.deepcopy({key: value for key, value in vars(model.config).items()})


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gemma3])
def test_the_model_is_left_as_it_was_found(make):
    model = make()
    before, hooks = state_of(model), sum(len(m._forward_hooks) for m in model.modules())
    collect(model, IDS)
    assert state_of(model) == before
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks


def test_also_after_an_exception():
    model = tiny_llama()
    before = state_of(model)
    expected = model(IDS).logits

    def fail(call):
        raise KeyError(f"in layer {call.layer}")

    with pytest.raises(KeyError, match="in layer 0"), intercept_attention(model, fail):
        model(IDS)
    assert state_of(model) == before
    assert torch.equal(model(IDS).logits, expected)


def test_interception_nests():
    model, seen = tiny_llama(), []

    def outer(call):
        seen.append(("outer", call.layer))
        return call.query

    with intercept_attention(model, outer):
        collect(model, IDS)
        model(IDS)
    assert seen == [("outer", 0), ("outer", 1), ("outer", 2)]


def tiny_bart():
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        )
    )  # fmt: skip


REFUSED = {
    "encoder-decoder": (tiny_bart, "encoder-decoder"),
    "no attention interface": (
        lambda: build(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
        "does not route its attention",
    ),
    "latent attention": (
        lambda: build(
            DeepseekV2Config(
                **COMMON, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=2, num_experts_per_tok=1,
                n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=3, topk_method="greedy",
            )
        ),
        r"multi-head latent attention \(kv_lora_rank 16\)",
    ),
    "linear attention": (
        lambda: build(
            Qwen3NextConfig(
                **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=2,
                num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
            )
        ),
        "layers of type linear_attention",
    ),
    "no attention at all": (
        lambda: build(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)),
        "has no attention heads",
    ),
    "bidirectional": (lambda: tiny_gemma3(use_bidirectional_attention=True), "bidirectional attention"),
    "chunked attention": (
        lambda: build(
            Llama4TextConfig(
                **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size_mlp=32,
                num_local_experts=2, attention_chunk_size=8,
            )
        ),
        "layers of type chunked_attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_layouts_are_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedAttention, match=reason):
        attention_layout(make())


def test_load_model_refuses_them_too(tmp_path):
    make, reason = REFUSED["no attention interface"]
    with pytest.raises(UnsupportedAttention, match=reason):
        load_model(str(save(make(), tmp_path / "bloom")))


def test_attention_sinks_are_refused_when_they_show():
    config = GptOssConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2,
        num_experts_per_tok=1, sliding_window=8,
    )  # fmt: skip
    model = build(config)
    before = state_of(model)
    with pytest.raises(UnsupportedAttention, match=r"attention sinks"):
        collect(model, IDS)
    assert state_of(model) == before


def test_layers_that_are_not_causal_are_refused_when_they_show():
    model = tiny_llama()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedAttention, match="layer 1 is not causal"):
        collect(model, IDS)


def test_dropout_is_refused():
    model = tiny_llama(attention_dropout=0.1).train()
    with pytest.raises(UnsupportedAttention, match=r"call model.eval\(\) first"):
        collect(model, IDS)
