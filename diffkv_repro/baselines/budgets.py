"""Two other ways to spend a pruning budget, on the same significance: the arms of DiffKV Figure 9.

``EqualBudget`` is the paper's "static" arm: every KV head keeps the same share. ``Coverage`` is ours: every head keeps
the fewest tokens that hold a share of its significance, so that budgets differ between heads without a threshold.
Both prune the prompt only, as SnapKV does.
"""

from dataclasses import dataclass, field

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
    """What both arms share: FP16, the ``window`` most recent tokens of the prompt always kept."""

    window: int = 64
    significance: Significance = field(default_factory=Significance)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; at least the newest token must be kept")

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, _BudgetRule(self), storage=storage)

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        """Tokens to keep beside the window, bool like ``significance``; only where ``eligible``."""
        raise NotImplementedError


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
        return f"equal budget {self.keep:.0%}"

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        rank = significance.masked_fill(~eligible, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
        older = eligible.sum(dim=-1, keepdim=True)
        recent = self.window * (older > 0)
        budget = ((older + recent) * self.keep).round() - recent
        return rank < budget


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
        return f"coverage {self.mass:.1%}"

    def kept(self, significance: Tensor, eligible: Tensor) -> Tensor:
        weight = significance.masked_fill(~eligible, 0)
        ordered, order = weight.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        chosen = before < self.mass * weight.sum(dim=-1, keepdim=True)
        return torch.zeros_like(chosen).scatter(-1, order, chosen)


class _BudgetRule(TierRule):
    precisions = (Precision(16, 16),)

    def __init__(self, method: _Budget) -> None:
        self._method = method

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        significance = self._method.significance.of_prompt(prompt)
        column = torch.arange(prompt.tokens, device=significance.device)
        window = column >= prompt.tokens - self._method.window
        eligible = (column >= padding[:, None])[:, None] & ~window
        kept = (self._method.kept(significance, eligible.expand_as(significance)) & eligible) | window
        return torch.where(kept, 0, DROPPED).to(torch.int8)
