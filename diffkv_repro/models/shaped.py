"""Random weights at the exact shape of a paper's model: for speed and memory, never for accuracy."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from diffkv_repro.models.shapes import ModelShape


def shaped_config(shape: ModelShape, *, max_positions: int = 32768) -> PreTrainedConfig:
    """The configuration of a Llama (or, with a key bias, Qwen2) of that shape; ValueError for mixtures of experts."""
    if shape.experts > 1 or shape.qk_norm:
        raise ValueError(f"{shape.name} is no plain Llama or Qwen2: random weights of its shape are not built")
    kind = Qwen2Config if shape.kv_bias else LlamaConfig
    return kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.tied_embeddings,
    )


def random_model(shape: ModelShape, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of ``shape`` with freshly initialised weights, made on ``device``, in evaluation mode.

    Its attention is close to even: whatever depends on which tokens matter must be given from a real model.
    """
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shaped_config(shape), dtype=dtype)
    return model.eval().requires_grad_(False)
