"""The weights of a Llama-type decoder as the engine uses them: loaded, or random at a paper's shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffkv_repro.engine.shards import Shards
from diffkv_repro.models.hf import UnsupportedAttention, decoder_of
from diffkv_repro.models.rope import key_biases
from diffkv_repro.models.shaped import shaped_config
from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.zoo import LoadedModel

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LARGEST_PART = 1 << 28  # numbers drawn at a time


@dataclass(frozen=True)
class LayerWeights:
    """One layer's share.

    ``qkv`` [(heads + 2 kv_heads) * head_dim, hidden] with ``qkv_bias`` or None, ``query_norm`` and ``key_norm``
    [head_dim] or None, ``output`` [hidden, heads * head_dim], ``gate_up`` [2 * intermediate, hidden], ``down``
    [hidden, intermediate].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """A decoder's share of weights. ``heads`` and ``kv_heads`` are this worker's; ``cos``, ``sin`` float32
    [max_positions, head_dim]; ``key_biases`` [kv_heads, head_dim] a layer, None where keys have none."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    key_biases: Sequence[Tensor] | None
    shards: Shards

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        parts = [own for layer in self.layers for own in vars(layer).values() if own is not None]
        parts += [self.embedding, self.final_norm, self.head]
        return sum({part.data_ptr(): part.nbytes for part in parts}.values())

    @classmethod
    def of_model(cls, loaded: LoadedModel, *, max_positions: int, shards: Shards | None = None) -> "Weights":
        """From a Llama-, Mistral-, Qwen2- or Qwen3-type model with full attention; UnsupportedAttention otherwise."""
        model, layout, shards = loaded.model, loaded.layout, shards or Shards()
        config, kind = model.config, model.config.model_type
        if kind not in _FAMILIES:
            raise UnsupportedAttention(f"{loaded.name} is of type {kind}; the engine runs {', '.join(_FAMILIES)}")
        if any(layer.kind != "full" for layer in layout.layers):
            raise UnsupportedAttention(f"{loaded.name} has sliding-window layers; the engine runs full attention only")
        decoder, own = decoder_of(model), shards.share("KV heads", layout.kv_heads)
        has_bias = kind == "qwen2" and decoder.layers[0].self_attn.k_proj.bias is not None
        biases = [bias[own] for bias in key_biases(model)] if has_bias else None
        positions = torch.arange(max_positions, device=model.device)[None]
        cos, sin = decoder.rotary_emb(torch.zeros(1, device=model.device), positions)
        return cls(
            loaded.name, layout.heads // shards.size, own.stop - own.start, layout.head_dim, config.rms_norm_eps,
            decoder.embed_tokens.weight, tuple(_layer(layer, layout, shards) for layer in decoder.layers),
            decoder.norm.weight, model.lm_head.weight, cos[0], sin[0], biases, shards,
        )  # fmt: skip

    @classmethod
    def random(
        cls, shape: ModelShape, *, max_positions: int, device: torch.device | str, dtype: torch.dtype,
        shards: Shards | None = None, seed: int = 0,
    ) -> "Weights":  # fmt: skip
        """Small random numbers at the shape of a paper's model: for speed and memory, never for what it says."""
        shards = shards or Shards()
        config = shaped_config(shape, max_positions=max_positions)
        kv_heads, heads = (shards.share("KV heads", shape.kv_heads), shards.share("heads", shape.heads))
        kv_heads, heads = kv_heads.stop - kv_heads.start, heads.stop - heads.start
        rows = shards.share("rows of the MLP", shape.intermediate)
        intermediate = rows.stop - rows.start
        draw = _drawing(device, dtype, seed)
        ones = torch.ones(shape.hidden, device=device, dtype=dtype)
        width = (heads + 2 * kv_heads) * shape.head_dim
        layers = tuple(
            LayerWeights(
                ones, draw(width, shape.hidden), draw(width) if shape.kv_bias else None, None, None,
                draw(shape.hidden, heads * shape.head_dim), ones, draw(2 * intermediate, shape.hidden),
                draw(shape.hidden, intermediate),
            )
            for _ in range(shape.layers)
        )  # fmt: skip
        embedding = draw(shape.vocab, shape.hidden)
        head = embedding if shape.tied_embeddings else draw(shape.vocab, shape.hidden)
        cos, sin = LlamaRotaryEmbedding(config).to(device)(
            torch.zeros(1, device=device), torch.arange(max_positions, device=device)[None]
        )
        first = heads * shape.head_dim
        biases = [
            layer.qkv_bias[first : first + kv_heads * shape.head_dim].float().view(kv_heads, shape.head_dim)
            for layer in layers
            if layer.qkv_bias is not None
        ]
        return cls(
            f"random weights of {shape.name}'s shape", heads, kv_heads, shape.head_dim, config.rms_norm_eps, embedding,
            layers, ones, head, cos[0], sin[0], biases or None, shards,
        )  # fmt: skip


def _drawing(device: torch.device | str, dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        made = torch.empty(size, device=device, dtype=dtype)
        for part in made.view(-1).split(_LARGEST_PART):
            part.normal_(std=0.02, generator=generator)
        return made

    return draw


def _layer(layer: torch.nn.Module, layout, shards: Shards) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = (
        slice(own.start * layout.head_dim, own.stop * layout.head_dim)
        for own in (shards.share("heads", layout.heads), shards.share("KV heads", layout.kv_heads))
    )
    inward = ((attention.q_proj, heads), (attention.k_proj, kv_heads), (attention.v_proj, kv_heads))
    rows = shards.share("rows of the MLP", mlp.gate_proj.out_features)
    biased = attention.q_proj.bias is not None
    for module, name in ((attention.o_proj, "o_proj"), (mlp.gate_proj, "gate_proj"), (mlp.down_proj, "down_proj")):
        if module.bias is not None:
            raise UnsupportedAttention(f"{name} has a bias, which the engine does not know")
    return LayerWeights(
        layer.input_layernorm.weight,
        torch.cat([module.weight[own] for module, own in inward]),
        torch.cat([module.bias[own] for module, own in inward]) if biased else None,
        attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        attention.o_proj.weight[:, heads].contiguous(),
        layer.post_attention_layernorm.weight,
        torch.cat([mlp.gate_proj.weight[rows], mlp.up_proj.weight[rows]]),
        mlp.down_proj.weight[:, rows].contiguous(),
    )
