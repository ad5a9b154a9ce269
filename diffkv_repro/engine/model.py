"""A Llama-type decoder on the paged cache: what one prompt step and one generation step compute."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkv_repro.engine.kv_cache import EngineCache
from diffkv_repro.engine.weights import LayerWeights, Weights


class Decoder:
    """``weights`` and the ``cache`` that its attention reads and writes."""

    def __init__(self, weights: Weights, cache: EngineCache) -> None:
        self.weights, self.cache = weights, cache

    def prompt(self, slots: Sequence[int], rows: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits [requests, vocab] after the last token of each prompt; all go into the cache, which has admitted them.

        ``tokens`` [requests, longest], padded on the right, which a causal model never looks at; ``lengths`` int32.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden, decided = self.weights.embedding[tokens], []

        for index, layer in enumerate(self.weights.layers):
            query, key, value = (side.transpose(1, 2) for side in self._project(layer, hidden, positions))
            decided.append(self.cache.prompt_layer(index, query, key, value, lengths))
            grouped = query.shape[1] > key.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            hidden = self._finish(layer, hidden, out.transpose(1, 2).flatten(-2))
        self.cache.finish_prompt(slots, rows, decided)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths.long() - 1]
        return self._logits(last)

    def step(
        self, tokens: Tensor, active: Tensor, rows: Tensor, columns: Tensor, prompts: Tensor, bound: int
    ) -> Tensor:
        """Logits [batch, vocab] after one more token a request; arguments as for :class:`EngineCache`.

        ``tokens`` int64 [batch] enter at positions ``columns``. Nothing waits for the device: a CUDA graph can hold it.
        """
        plan = self.cache.begin_step(active, rows, columns, prompts)
        hidden, positions = self.weights.embedding[tokens], columns.long()
        for index, layer in enumerate(self.weights.layers):
            query, key, value = self._project(layer, hidden, positions)
            out = self.cache.attend(index, query, key, value, plan, rows, columns, bound)
            hidden = self._finish(layer, hidden, out.flatten(-2))
        return self._logits(hidden)

    def _project(self, layer: LayerWeights, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, head_dim], the first two after RoPE."""
        own = self.weights
        projected = F.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = projected.unflatten(-1, (-1, own.head_dim))
        query, key, value = heads.split([own.heads, own.kv_heads, own.kv_heads], dim=-2)
        if layer.query_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        cos, sin = own.cos[positions][..., None, :], own.sin[positions][..., None, :]
        return _turned(query, cos, sin), _turned(key, cos, sin), value

    def _finish(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention in a layer; the two sums over workers are here."""
        add = self.weights.shards.add
        hidden = hidden + add(F.linear(attended, layer.output))
        gate, up = F.linear(self._norm(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + add(F.linear(F.silu(gate) * up, layer.down))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, self.weights.final_norm), self.weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.weights.norm_eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
