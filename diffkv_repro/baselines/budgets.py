"""Ways to spend a pruning budget, on the same significance: the arms of DiffKV Figure 9.

``Threshold`` is the paper's "dynamic" arm: alpha over position or length decides in every head. ``EqualBudget`` is
its "static" arm: every KV head keeps the same share. ``Coverage`` is ours: every head keeps the fewest tokens that
hold a share of its significance, so that budgets differ between heads without a threshold. All three prune the
prompt only, as SnapKV does, so that nothing but the spending differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import TieredLayer, TierRule
from diffkv_repro.core.precision import Precision


@dataclass(frozen=True)
class _Budget(Method):
    """What the arms share: FP16, the ``window`` most recent tokens of the prompt always kept."""

    window: int = 64
    significance: Significance = field(default_factory=Significance)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; at least the newest token must be kept")

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, _BudgetRule(self), storage=storage)

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        """Which of the ``eligible`` tokens to keep, bool like ``significance`` [batch, kv_heads, tokens]."""
        raise NotImplementedError

    def fitted(self, prompts: Sequence[PromptAttention], share: float) -> Self:
        """The same method with its parameter such that ``share`` of all tokens of ``prompts`` is pruned."""
        raise NotImplementedError

    def outside_window(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        """[batch, 1, tokens]: tokens that may be pruned."""
        column = torch.arange(prompt.tokens, device=padding.device)
        return ((column >= padding[:, None]) & (column < prompt.tokens - self.window))[:, None]


@dataclass(frozen=True)
class Threshold(_Budget):
    """Each KV head keeps the tokens whose significance is at least ``alpha`` / ``divisor``."""

    alpha: float = 0.02
    divisor: Literal["position", "length"] = "position"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisor not in ("position", "length"):
            raise ValueError(f"divisor is {self.divisor!r}; allowed are position, length")

    @property
    def label(self) -> str:
        return f"threshold {self.alpha:.3g}/{self.divisor}"

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        return self._scaled(significance, eligible) >= self.alpha

    def fitted(self, prompts: Sequence[PromptAttention], share: float) -> Self:
        values, tokens = [], 0
        for prompt in prompts:
            significance = self.significance.of_prompt(prompt)
            eligible = self.outside_window(prompt, _padding(prompt)).expand_as(significance)
            values.append(self._scaled(significance, eligible)[eligible])
            tokens += significance.numel() - int(_padding(prompt).sum()) * significance.shape[1]
        ordered = torch.cat(values).sort().values
        if not len(ordered):
            return self  # all within the window: nothing to prune
        return replace(self, alpha=float(ordered[min(round(share * tokens), len(ordered) - 1)]))

    def _scaled(self, significance: Tensor, eligible: Tensor) -> Tensor:
        """Significance times what alpha is divided by."""
        columns = eligible.shape[-1]
        first = eligible.int().argmax(dim=-1, keepdim=True)  # of the sequence: what is before it is padding
        column = torch.arange(columns, device=significance.device)
        return significance * ((column - first + 1).clamp_min(1) if self.divisor == "position" else columns - first)


@dataclass(frozen=True)
class EqualBudget(_Budget):
    """Each KV head keeps ``keep`` of the prompt: the window and the most significant of the rest."""

    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; allowed are 0 to 1")

    @property
    def label(self) -> str:
        return f"equal budget {100 * self.keep:.3g} %"

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        order = significance.masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        rank = order.argsort(dim=-1)
        older = eligible.sum(dim=-1, keepdim=True)
        recent = self.window * (older > 0)
        budget = ((older + recent) * self.keep).round() - recent
        return rank < budget

    def fitted(self, prompts: Sequence[PromptAttention], share: float) -> Self:
        return replace(self, keep=1 - share)


@dataclass(frozen=True)
class Coverage(_Budget):
    """Each KV head keeps the fewest tokens that hold ``mass`` of the significance outside its window."""

    mass: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mass <= 1:
            raise ValueError(f"mass is {self.mass}; allowed are 0 to 1")

    @property
    def label(self) -> str:
        return f"coverage {100 * self.mass:.4g} %"

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        weight = significance.masked_fill(~eligible, 0)
        ordered, order = weight.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        chosen = before < self.mass * weight.sum(dim=-1, keepdim=True)
        return torch.zeros_like(chosen).scatter(-1, order, chosen)

    def fitted(self, prompts: Sequence[PromptAttention], share: float) -> Self:
        known = [
            (self.significance.of_prompt(prompt), self.outside_window(prompt, _padding(prompt))) for prompt in prompts
        ]
        tokens = sum(s.numel() - int(_padding(p).sum()) * s.shape[1] for (s, _), p in zip(known, prompts, strict=True))
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = replace(self, mass=(low + high) / 2)
            pruned = sum(int((~middle.kept(s, e.expand_as(s)) & e).sum()) for s, e in known)
            low, high = (middle.mass, high) if pruned > share * tokens else (low, middle.mass)
        return replace(self, mass=high)


@dataclass(frozen=True)
class AtShare(Method):
    """``budget`` with its parameter fitted so that ``share`` of the tokens of the prompts at hand is pruned.

    For comparisons at an equal share: thresholds prune different shares of different texts.
    """

    budget: _Budget
    share: float
    name: str

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share is {self.share}; allowed are 0 to below 1")

    @property
    def label(self) -> str:
        return f"{self.name}, {100 * self.share:g} % pruned"

    def fitted_to(self, prompts: Sequence[PromptAttention]) -> Method:
        return self.budget.fitted(prompts, self.share)

    def layer(self, place: Place, storage: str) -> LayerCache:
        raise ValueError(f"{self.label}: fit it to prompts first, with fitted_to()")


class _BudgetRule(TierRule):
    precisions = (Precision(16, 16),)

    def __init__(self, method: _Budget) -> None:
        self._method = method

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        significance = self._method.significance.of_prompt(prompt)
        eligible = self._method.outside_window(prompt, padding).expand_as(significance)
        kept = self._method.kept(significance, eligible) | ~eligible
        return torch.where(kept, 0, DROPPED).to(torch.int8)


def _padding(prompt: PromptAttention) -> Tensor:
    if prompt.padding is not None:
        return prompt.padding
    return torch.zeros(prompt.call.key.shape[0], dtype=torch.long, device=prompt.call.key.device)
