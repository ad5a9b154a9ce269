"""``EngineCache``: the paged cache of a worker, DiffKV's or plain FP16, behind the few verbs that a step needs.

Both are the same pages, tables, free list, attention kernel and code; FP16 is one tier of 16 bits in which every token
stays, so whatever differs between two runs of the engine is due to compression.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.cache.layer import Place
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy, paged_ops
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.paged_view import PLAN_FIELDS, KeyBias, PagedRule, PagedView
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.hf import AttentionLayout, LayerAttention

_PAGE_TOKENS = 32  # of a single tier: whole steps of the attention kernel

PER_QUERY_HEAD = "fp16-per-query-head"
Cache = Literal["fp16", "fp16-per-query-head"] | CompressionPolicy | Precision


class EngineCache:
    """Pages for ``max_requests`` requests of at most ``max_tokens`` tokens.

    ``cache`` is ``"fp16"``, a precision for all tokens, or a policy; a policy must keep one score a KV head
    (``group_max="each-step"``). ``"fp16-per-query-head"`` reads a page once for each query head of its KV head, as
    kernels without grouped queries do: the baseline that Figure 15b seems to have. The pool takes ``pool_bytes``, or
    holds ``max_requests`` full requests. With ``replay`` the policy's decisions are made, at their cost, and then
    overruled by recorded shares: for random weights.
    Raises ValueError for what cannot be.
    """

    def __init__(
        self, cache: Cache, weights: Weights, *, max_requests: int, max_tokens: int, pool_bytes: int | None = None,
        replay: TierReplay | None = None, watermark: float = 0.01,
    ) -> None:  # fmt: skip
        self.policy = cache if isinstance(cache, CompressionPolicy) else None
        self.layouts = _layouts(cache, weights.head_dim)
        self.layers, self.kv_heads = len(weights.layers), weights.kv_heads
        self.max_tokens, self.replay = max_tokens, replay
        self._group = weights.heads // weights.kv_heads if cache == PER_QUERY_HEAD else 1
        self._tables = None
        if replay is not None and self.policy is None:
            raise ValueError("a replay of tiers needs a policy, whose decisions it overrules")
        page_bytes = self.layouts[0].page_bytes
        full = math.ceil(max_requests * self.most_pages(max_tokens) / (1 - watermark)) + 1
        pages = full if pool_bytes is None else min(full, pool_bytes // page_bytes)
        if pages < 1:
            raise ValueError(f"pool_bytes is {pool_bytes}; a page takes {page_bytes}")
        self.memory = PagedMemory(
            self.layouts, pages=pages, layers=self.layers, kv_heads=self.kv_heads, max_requests=max_requests,
            max_tokens=max_tokens, device=weights.device, watermark=watermark,
        )  # fmt: skip
        self.view = PagedView(self.memory.pool, self.memory.tables, self.memory.lengths, self.memory.layouts)
        self.scale = weights.head_dim**-0.5
        self.rule = self._rule(weights) if self.policy else None
        self.bias = None
        if self.policy is not None and self.policy.bias_free and weights.key_biases is not None:
            self.bias = KeyBias.of(weights.key_biases, weights.cos, weights.sin)
        if replay is not None:
            replay.check(self.layers, self.kv_heads, len(self.layouts))

    def most_pages(self, tokens: int) -> int:
        """Pages that a request of ``tokens`` can ask for: full ones, and two a tier, one open and one for a step."""
        full = tokens // min(layout.tokens for layout in self.layouts)
        return self.layers * self.kv_heads * (full + 2 * len(self.layouts))

    def _rule(self, weights: Weights) -> PagedRule:
        layout = AttentionLayout(
            (LayerAttention("full"),) * self.layers, weights.heads, self.kv_heads, weights.head_dim, self.max_tokens
        )
        self.policy.check(layout)
        rules = [self.policy.rule(Place(layer, layout, weights.dtype, weights.device)) for layer in range(self.layers)]
        rule = PagedRule.of(rules, self.kv_heads)
        return dataclasses.replace(rule, alphas=rule.alphas.to(weights.device))

    # Prompt phase: admit each, then for all layers prompt_layer, then finish_prompt.

    def admit(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Pages for prompts, as many as they could need."""
        self.memory.admit(slots, tokens)

    def prompt_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> tuple:
        """Decide on the tokens of a layer: ``query`` [requests, heads, tokens, head_dim], ``lengths`` int32 [requests].

        What comes back is for :meth:`finish_prompt`, once all layers are there.
        """
        if self.rule is None:
            column = torch.arange(key.shape[2], dtype=torch.int32, device=key.device)
            inside = (column < lengths[:, None])[:, None].expand(key.shape[:3])
            tiers = torch.where(inside, 0, -1).to(torch.int8)
            places = column.expand(key.shape[:3]).contiguous()
            counts = lengths[:, None, None].expand(-1, self.kv_heads, 1)
            return key, value, tiers, places, counts, torch.zeros(key.shape[:3], device=key.device)
        options = {"scale": self.scale, "lengths": lengths}
        scores = paged_ops.significance(query, key, self.policy.significance, **options)
        tiers, places, counts = paged_ops.classify_and_partition(scores, lengths, self.rule, layer=layer)
        if self.replay is not None:
            tiers, places, counts = self.replay.prompt(layer, lengths, key.shape[2], self.rule.window)
        return key, value, tiers, places, counts, scores

    def finish_prompt(self, slots: Sequence[int], rows: Tensor, decided: Sequence[tuple]) -> None:
        """Give back what the plan leaves, and write the codes."""
        counts = torch.stack([own[4] for own in decided], dim=1).to(torch.int32).contiguous()
        self.memory.compact(slots, counts, validate=False)
        for layer, (key, value, tiers, places, _, scores) in enumerate(decided):
            paged_ops.pack(self.view, key, value, tiers, places, scores, rows, layer=layer, bias=self.bias)

    # Generation phase: begin_step, then for each layer append and attend. Nothing here waits for the device.

    def begin_step(self, active: Tensor, rows: Tensor, columns: Tensor, prompts: Tensor) -> Tensor:
        """Pages for a token of every request in ``active`` uint8 [max_requests], and the plan of all layers.

        ``rows``, ``columns``, ``prompts`` int32 [batch]: table rows (-1: none), tokens so far, of them the prompt's.
        """
        self.memory.reserve_step(active)
        if self._group > 1:
            self._tables = self.view.tables.repeat_interleave(self._group, dim=3)
        decided = self.decide(rows, columns, prompts)
        return self.given_plan(rows, columns) if decided is None or self.replay is not None else decided

    def decide(self, rows: Tensor, columns: Tensor, prompts: Tensor) -> Tensor | None:
        """What the policy does with stored tokens in a step, all layers at once; None where every token stays."""
        return None if self.rule is None else paged_ops.decide(self.view, rows, columns, prompts, self.rule)

    def given_plan(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The plan of a step that no score decides: the replay says, or every token stays."""
        lengths = self.view.lengths[rows.clamp_min(0).long()].permute(1, 0, 2, 3)  # [layers, batch, kv_heads, tiers]
        if self.replay is not None:
            return self.replay.step(lengths, columns, self.rule.window)
        return torch.nn.functional.pad(lengths, (0, PLAN_FIELDS - 1), value=-1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Tensor, rows: Tensor, columns: Tensor,
        bound: int,
    ) -> Tensor:  # fmt: skip
        """Take in one token a request and attend to all: [batch, heads, head_dim]. ``bound`` is the most tokens that a
        head of these requests can hold."""
        paged_ops.append(self.view, key, value, plan[layer], rows, columns, layer=layer, bias=self.bias)
        if self._group > 1:
            lengths = self.view.lengths[:, layer : layer + 1].repeat_interleave(self._group, dim=2)
            wide = PagedView(self.view.pool, self._tables[:, :, layer : layer + 1], lengths, self.view.layouts)
            return paged_ops.decode_attention(
                wide, query, layer=0, requests=rows, scale=self.scale, update_scores=False, max_tokens=bound
            )
        newest = plan[layer, ..., 0].contiguous() if self.rule is not None else None
        return paged_ops.decode_attention(
            self.view, query, layer=layer, requests=rows, scale=self.scale, update_scores=self.rule is not None,
            newest=newest, bias=self.bias, max_tokens=bound,
        )  # fmt: skip

    def release(self, slots: Sequence[int]) -> None:
        """All pages of these requests back to the list."""
        self.memory.release(slots)

    def can_admit(self, tokens: int, running: int) -> bool:
        """Whether a prompt finds pages, and after it a step of all ``running`` requests and its own: else it would have
        to leave again at once. Asks the device only when in doubt."""
        heads, memory = self.layers * self.kv_heads, self.memory
        needed = heads * (memory.prompt_pages(tokens) + len(self.layouts) * (running + 1)) + memory.watermark
        return needed <= memory.free_bound or needed <= memory.synchronize_counts()

    def can_step(self) -> bool:
        """Whether the next step finds its pages, whatever it needs; asks the device only when in doubt."""
        if self.memory.can_step():
            return True
        self.memory.synchronize_counts()
        return self.memory.can_step()

    def kv_bytes(self, slots: Sequence[int], tokens: Sequence[int]) -> KVBytes:
        """What requests hold, item by item; waits for the device."""
        return self.memory.kv_bytes(slots, tokens=tokens)


def _layouts(cache: Cache, head_dim: int) -> list[PageLayout]:
    """Pages of the least slack for several tiers; for one, of whole steps of the kernel."""
    if isinstance(cache, CompressionPolicy):
        size = search_page_bytes(cache.tiers, head_dim)
        return [PageLayout(tier, head_dim, size) for tier in cache.tiers]
    if cache not in ("fp16", PER_QUERY_HEAD) and not isinstance(cache, Precision):
        raise ValueError(f"cache is {cache!r}; it must be 'fp16', a Precision or a CompressionPolicy")
    precision = cache if isinstance(cache, Precision) else Precision.parse("FP16")
    return [PageLayout.holding(precision, head_dim, _PAGE_TOKENS)]
