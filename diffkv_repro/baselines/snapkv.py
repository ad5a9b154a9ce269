"""SnapKV (Li et al., NeurIPS 2024, arXiv:2404.14469): the end of a prompt votes for what to keep of the rest.

The scores that the last ``window`` queries of the prompt give to every earlier token are added up, pooled along the
tokens so that neighbours of a token with many votes come along, and each head keeps the tokens with the highest result
besides the window itself. The prompt alone is compressed: everything generated is kept.

Defaults: a window of 32 queries and max pooling over 7 tokens, the settings of the paper's LongBench runs (released as
configuration ``w32_k7_maxpool``). What the released code falls back to without a configuration is a window of 32 and
average pooling over 5. Its capacities are absolute (1024, 2048, 4096 tokens); ``keep`` is a share of the prompt, as
DiffKV states SnapKV's budget (50 %, and 25 % on LongBench).

Deviations:

- The released code repeats keys and values for all query heads, each of which then keeps tokens of its own: the cache
  of a model with grouped queries grows by the group before it shrinks. Here the query heads of a KV head share one
  choice, by the ``mean`` of their pooled votes (or the ``max``). The mean ranks tokens by what the group as a whole
  attends to, and no single sharp head decides alone.
- Votes are summed in float32; the released code rounds scores to the model's dtype first.
- Of tokens with equal votes, which max pooling makes common, the earliest go first; there, ``topk`` picks any.
- The window is kept even where ``keep`` of a short prompt is less than it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.baselines.h2o import highest
from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import TieredLayer, TierRule
from diffkv_repro.core.precision import Precision

Pooling = Literal["max", "average"]
Group = Literal["mean", "max"]


@dataclass(frozen=True)
class SnapKV(Method):
    """Each KV head keeps ``keep`` of the prompt: the ``window`` most recent tokens and those they vote for.

    ``kernel`` tokens (odd) are pooled by their ``pooling``; query heads of one KV head agree by ``group``.
    """

    keep: float = 0.5
    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    group: Group = "mean"

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; allowed are 0 to 1")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; allowed are odd numbers from 1")
        for name, kind in (("pooling", Pooling), ("group", Group)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(kind))}")

    @property
    def label(self) -> str:
        return f"SnapKV {self.keep * 100:g} %"

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, _VotedRule(self, place), storage=storage)

    def voted(self, length: Tensor, place: Place) -> Tensor:
        """Tokens that a head keeps besides its window, for prompts of ``length`` [batch]."""
        del place
        return ((length.double() * self.keep).round().long() - self.window).clamp_min(0)

    def votes(self, prompt: PromptAttention) -> Tensor:
        """Pooled scores of the tokens before the window, [batch, kv_heads, tokens - window] in float32."""
        older = prompt.tokens - self.window
        votes = prompt.rows(self.window)[..., :older].sum(dim=2)
        # Padding on the left has no votes, and the pooling itself takes what lies beyond the ends as none: a padded
        # prompt is pooled as it would be alone.
        pool = functional.max_pool1d if self.pooling == "max" else functional.avg_pool1d
        pooled = pool(votes, self.kernel, stride=1, padding=self.kernel // 2)
        grouped = pooled.unflatten(1, (prompt.call.key.shape[1], -1))
        return grouped.mean(dim=2) if self.group == "mean" else grouped.amax(dim=2)


class _VotedRule(TierRule):
    precisions = (Precision(16, 16),)

    def __init__(self, method: SnapKV, place: Place) -> None:
        self._method = method
        self._place = place

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        batch, kv_heads, tokens, _ = prompt.call.key.shape
        tier = torch.zeros(batch, kv_heads, tokens, dtype=torch.int8, device=prompt.call.key.device)
        older = tokens - self._method.window
        if older <= 0:
            return tier
        eligible = torch.arange(older, device=tier.device) >= padding[:, None]
        count = self._method.voted(tokens - padding, self._place)
        kept = highest(self._method.votes(prompt), eligible[:, None], count)
        tier[..., :older].masked_fill_(~kept, DROPPED)
        return tier
