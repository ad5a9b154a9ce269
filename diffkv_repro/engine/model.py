"""A Llama-type decoder on the paged cache: what one prompt step and one generation step compute."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkv_repro.engine import ops
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
        hidden, delta, decided = self.weights.embedding[tokens], None, []

        for index, layer in enumerate(self.weights.layers):
            hidden, normed = self._norm(hidden, delta, layer.input_norm)
            query, key, value = (side.transpose(1, 2) for side in self._project(layer, normed, positions))
            decided.append(self.cache.prompt_layer(index, query, key, value, lengths))
            grouped = query.shape[1] > key.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            hidden, delta = self._finish(layer, hidden, out.transpose(1, 2).flatten(-2))
        self.cache.finish_prompt(slots, rows, decided)
        at = torch.arange(len(tokens), device=tokens.device), lengths.long() - 1
        return self._logits(hidden[at], delta[at])

    def step(
        self, tokens: Tensor, active: Tensor, rows: Tensor, columns: Tensor, prompts: Tensor, bound: int
    ) -> Tensor:
        """Logits [batch, vocab] after one more token a request; arguments as for :class:`EngineCache`.

        ``tokens`` int32 [batch] enter at positions ``columns``. Nothing waits for the device: a CUDA graph can hold it.
        """
        plan = self.cache.begin_step(active, rows, columns, prompts)
        hidden, delta = self.weights.embedding[tokens], None
        for index, layer in enumerate(self.weights.layers):
            hidden, normed = self._norm(hidden, delta, layer.input_norm)
            query, key, value = self._project(layer, normed, columns)
            out = self.cache.attend(index, query, key, value, plan, rows, columns, bound)
            hidden, delta = self._finish(layer, hidden, out.flatten(-2))
        return self._logits(hidden, delta)

    def _project(self, layer: LayerWeights, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, head_dim], the first two after RoPE."""
        own = self.weights
        projected = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = projected.unflatten(-1, (-1, own.head_dim))
        query, key, value = heads.split([own.heads, own.kv_heads, own.kv_heads], dim=-2)
        if layer.query_norm is not None:
            query, key = self._norm(query, None, layer.query_norm)[1], self._norm(key, None, layer.key_norm)[1]
        return *ops.rotate(query, key, own.cos, own.sin, positions), value

    def _finish(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """What follows attention in a layer: ``hidden``, and what is yet to be added to it. The two sums over workers
        are here."""
        add = self.weights.shards.add
        hidden, normed = self._norm(hidden, add(F.linear(attended, layer.output)), layer.post_norm)
        return hidden, add(F.linear(ops.gated(F.linear(normed, layer.gate_up)), layer.down))

    def _logits(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, delta, self.weights.final_norm)[1], self.weights.head)

    def _norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(hidden, delta, weight, self.weights.norm_eps)
