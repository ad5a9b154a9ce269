"""Real models, and the shapes of the papers' models."""

from diffkv_repro.models.hf import (
    AttentionCall,
    AttentionLayout,
    LayerAttention,
    UnsupportedAttention,
    attention_layout,
    intercept_attention,
)
from diffkv_repro.models.rope import has_key_bias
from diffkv_repro.models.shapes import SHAPES, ModelShape, shape_of
from diffkv_repro.models.zoo import LoadedModel, ModelError, load_model, untrained_twin

__all__ = [
    "SHAPES",
    "AttentionCall",
    "AttentionLayout",
    "LayerAttention",
    "LoadedModel",
    "ModelError",
    "ModelShape",
    "UnsupportedAttention",
    "attention_layout",
    "has_key_bias",
    "intercept_attention",
    "load_model",
    "shape_of",
    "untrained_twin",
]  # fmt: skip
