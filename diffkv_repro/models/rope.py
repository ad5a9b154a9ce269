"""Rotary position embedding as the model itself applies it, and the bias of its key projections."""

import copy
import sys

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffkv_repro.core.errors import first_line
from diffkv_repro.models.hf import UnsupportedAttention, attention_layout, decoder_of


class Rope:
    """Turn key vectors to a position, or back, with the family's own functions."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = decoder_of(model)
        module = sys.modules[type(decoder).__module__]
        # A copy: some embeddings stretch themselves to the positions they have seen.
        self._embed = copy.deepcopy(getattr(decoder, "rotary_emb", None))
        self._apply = getattr(module, "apply_rotary_pos_emb", None)
        if self._embed is None or self._apply is None:
            raise UnsupportedAttention(f"{type(model).__name__} has no rotary embedding that this package knows")
        if not all(layer.kind == "full" for layer in attention_layout(model).layers):
            raise UnsupportedAttention(
                f"{type(model).__name__} has sliding-window layers, whose rotary embedding may differ from the others'"
            )
        layout = attention_layout(model)
        try:
            self.rotate(
                torch.zeros(1, 1, 1, layout.head_dim, device=model.device), torch.zeros(1, 1, device=model.device)
            )
        except (RuntimeError, TypeError) as error:
            raise UnsupportedAttention(
                f"{type(model).__name__} does not turn all {layout.head_dim} channels of a key: {first_line(error)}"
            ) from error

    def rotate(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """``keys`` [batch, heads, tokens, head_dim] turned to ``positions`` [batch, tokens], in float32."""
        keys = keys.float()
        cos, sin = self._embed(keys, positions)
        # Some families scale cos and sin (long-context RoPE); undoing that divides by the square of the scale.
        scale = getattr(self._embed, "attention_scaling", 1.0)
        if back:
            cos, sin = cos / scale**2, -sin / scale**2
        _, turned = self._apply(keys, keys, cos.float(), sin.float())
        return turned


def key_biases(model: PreTrainedModel) -> list[Tensor | None]:
    """For each layer the bias [kv_heads, head_dim] of its key projection, None where it has none.

    Raises UnsupportedAttention where keys are normalised after the bias, or the projection is fused: there is no
    vector then that is added to every key.
    """
    layout = attention_layout(model)
    found: dict[int, Tensor | None] = {}
    for module in decoder_of(model).modules():
        index = getattr(module, "layer_idx", None)
        if index is None or not any(hasattr(module, name) for name in ("q_proj", "qkv_proj")):
            continue
        projection = getattr(module, "k_proj", None)
        if not isinstance(projection, nn.Linear):
            raise UnsupportedAttention(f"layer {index} of {type(model).__name__} has no key projection of its own")
        bias = projection.bias
        if bias is not None and any(hasattr(module, name) for name in ("k_norm", "k_layernorm")):
            raise UnsupportedAttention(f"layer {index} of {type(model).__name__} normalises its keys after the bias")
        found[index] = None if bias is None else bias.detach().float().view(layout.kv_heads, layout.head_dim)
    if sorted(found) != list(range(len(layout.layers))):
        raise UnsupportedAttention(f"{type(model).__name__}: found key projections of {len(found)} layers only")
    return [found[index] for index in sorted(found)]


def has_key_bias(model: PreTrainedModel) -> bool:
    """Whether any layer adds a (non-zero) bias to its keys."""
    return any(bias is not None and bool(torch.any(bias != 0)) for bias in key_biases(model))
