"""Time what compressing a prompt adds to its prefill on a GPU: significance, decisions, memory manager, packing."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import paged_ops
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.paged_view import PagedRule, PagedView
from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.step_cost import ModelStep

TIERS = ("K8V4", "K4V2")
RULES = {
    "last 64 queries": Significance("last", 64, own_score=True),
    "all later queries": Significance("later"),
}
"""Whose attention makes a token significant: the released code's rule, and the paper's."""

_HIGH, _LOW = 0.3, 0.6  # shares of the tokens
_AHEAD_CYCLES = 60_000_000  # of waiting on the device, so that the host has enqueued everything before the clock starts


@dataclass(frozen=True)
class PromptTiming:
    """Seconds on the device (medians of ``repeats``) to compress the prompts of ``batch`` requests in all layers.

    ``significance`` is the part that scores the tokens; ``prefill`` executing a model of the shape on the same prompts;
    ``high`` and ``low`` the shares of the tokens that went into each tier.
    """

    rule: str
    shape: str
    batch: int
    tokens: int
    layers: int
    compression: float
    significance: float
    prefill: float
    high: float
    low: float
    repeats: int
    device: str

    @property
    def share(self) -> float:
        """Compression over prefill."""
        return self.compression / self.prefill

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def bench_prompt(
    shape: ModelShape, *, batch: int = 1, tokens: int = 4096, repeats: int = 10, seed: int = 0
) -> list[PromptTiming]:
    """Both :data:`RULES` on random queries, keys and values, one layer's for all.

    Needs a CUDA device, else RuntimeError. Where all later queries count, the sums of their softmax
    come from the attention of the prefill, which computes them anyway. Thresholds are such that 30 % of the tokens come
    into the first tier and 60 % into the second.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("prompt compression is timed on a CUDA device, and there is none")
    for name, value in (("batch", batch), ("tokens", tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    prefill = ModelStep(shape, device="cuda", seed=seed).cost("prompt", batch, tokens, max(3, repeats // 2)).median
    return [_Prompt(shape, batch, tokens, seed).timing(name, repeats, prefill) for name in RULES]


class _Prompt:
    def __init__(self, shape: ModelShape, batch: int, tokens: int, seed: int) -> None:
        self.shape, self.batch, self.tokens = shape, batch, tokens
        precisions = [Precision.parse(name) for name in TIERS]
        page_bytes = search_page_bytes(precisions, shape.head_dim)
        layouts = [PageLayout(precision, shape.head_dim, page_bytes) for precision in precisions]
        pages = batch * shape.layers * shape.kv_heads * (-(-tokens // layouts[0].tokens) + 2)
        self.memory = PagedMemory(
            layouts, pages=pages, layers=shape.layers, kv_heads=shape.kv_heads, max_requests=batch, max_tokens=tokens,
            device="cuda", watermark=0.0,
        )  # fmt: skip
        self.view = PagedView(self.memory.pool, self.memory.tables, self.memory.lengths, self.memory.layouts)
        generator = torch.Generator("cuda").manual_seed(seed)

        def random(heads: int) -> torch.Tensor:
            size = (batch, heads, tokens, shape.head_dim)
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.float16)

        self.query, self.key, self.value = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
        self.slots = list(range(batch))
        self.rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self.scale = shape.head_dim**-0.5
        expanded = (own.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for own in (self.key, self.value))
        self.log_sums = torch.ops.aten._scaled_dot_product_flash_attention(
            self.query, *expanded, 0.0, True, scale=self.scale
        )[1]

    def timing(self, name: str, repeats: int, prefill: float) -> PromptTiming:
        significance = RULES[name]
        scored = [self._significance(significance)]
        rule = self._rule(significance, scored[0])

        def scores() -> None:
            for _ in range(self.shape.layers):
                scored[0] = self._significance(significance)

        def compress() -> None:
            self.memory.admit(self.slots, [self.tokens] * self.batch)
            decided = []
            for layer in range(self.shape.layers):
                sums = self._significance(significance)
                decided.append((sums, *paged_ops.classify_and_partition(sums, self.lengths, rule, layer=layer)))
            self.memory.compact(self.slots, torch.stack([counts for *_, counts in decided], dim=1), validate=False)
            for layer, (sums, tiers, places, _) in enumerate(decided):
                paged_ops.pack(self.view, self.key, self.value, tiers, places, sums, self.rows, layer=layer)

        seconds = []
        for _ in range(repeats + 2):
            seconds.append(_device_seconds(compress))
            kept = self.memory.lengths[self.slots].float().mean(dim=(0, 1, 2)) / self.tokens
            self.memory.release(self.slots)
        scoring = [_device_seconds(scores) for _ in range(repeats + 2)]
        return PromptTiming(
            name, self.shape.name, self.batch, self.tokens, self.shape.layers, statistics.median(seconds[2:]),
            statistics.median(scoring[2:]), prefill, *kept.tolist(), repeats, torch.cuda.get_device_name(),
        )  # fmt: skip

    def _significance(self, rule: Significance) -> torch.Tensor:
        options = {"scale": self.scale, "lengths": self.lengths}
        if rule.queries == "last":
            return paged_ops.significance(self.query, self.key, rule, **options)
        from diffkv_repro.kernels.significance import significance_triton

        return significance_triton(
            self.query, self.key, observed=0, own_score=rule.own_score, log_sums=self.log_sums, **options
        )

    def _rule(self, significance: Significance, sums: torch.Tensor) -> PagedRule:
        """Thresholds for all heads that leave the tokens of these prompts in the shares that the class promises."""
        means = sums / significance.counts(self.tokens, self.tokens, sums.device) * self.tokens
        alphas = torch.quantile(means.flatten()[: 1 << 20], 1 - torch.tensor([_HIGH, _HIGH + _LOW], device="cuda"))
        return PagedRule(
            alphas=alphas[None, :, None].expand(self.shape.layers, -1, self.shape.kv_heads).contiguous(),
            window=64, observed=significance.observed if significance.queries == "last" else 0,
            own_score=significance.own_score, prompt_by_position=False, decode_by_position=False, decode="algorithm-1",
        )  # fmt: skip


def _device_seconds(call: Callable[[], object]) -> float:
    """Time of the device alone: what is left where the host, as in a prefill, runs ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
