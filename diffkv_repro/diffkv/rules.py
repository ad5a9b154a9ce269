"""The rules behind a policy: one vectorised pass over a prompt, one token a step in generation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Move, Step, TierRule, smallest
from diffkv_repro.core.precision import Precision


@dataclass
class PolicyRule(TierRule):
    """Thresholds in the prompt (DiffKV section 4); what differs in generation is left to subclasses.

    ``alphas`` [kv_heads] or [1], one a tier. Significance is compared with alpha over the token's position, counted
    from 1, or over the length.
    """

    precisions: tuple[Precision, ...]
    alphas: Sequence[Tensor]
    window: int
    significance: Significance
    prompt_by_position: bool
    decode_by_position: bool
    score_width: int

    def __post_init__(self) -> None:
        self.decides = True
        self.own_score = self.significance.own_score

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        significance = self.significance.of_prompt(prompt)
        column = torch.arange(prompt.tokens, device=significance.device)
        length = (prompt.tokens - padding)[:, None, None]
        position = (column - padding[:, None] + 1).clamp_min(1)[:, None]
        tier = self.classify(significance, position if self.prompt_by_position else length)
        return tier.masked_fill(column >= prompt.tokens - self.window, 0)

    def prompt_scores(self, prompt: PromptAttention) -> Tensor:
        sums = self.significance.sums(prompt)
        return sums if self.score_width == sums.shape[2] else sums.amax(dim=2, keepdim=True)

    def classify(self, significance: Tensor, divisor: Tensor) -> Tensor:
        """Tier int8 of ``significance`` [batch, kv_heads, ...] against alpha / ``divisor`` (of the same rank).

        Above a tier's threshold a token is in that tier; exactly at the last one it still is (section 4: low is the
        closed interval).
        """
        shape = (-1, *[1] * (significance.ndim - 2))
        tier = torch.zeros(significance.shape, dtype=torch.int8, device=significance.device)
        for alpha in self.alphas[:-1]:
            tier += significance <= alpha.view(shape) / divisor
        return tier.masked_fill(significance < self.alphas[-1].view(shape) / divisor, DROPPED)

    def current(self, step: Step) -> Tensor:
        """Significance of the stored tokens, [batch, kv_heads, columns]."""
        counts = self.significance.counts(step.columns, step.prompt_columns, step.scores.device)
        return step.scores.amax(dim=2) / counts

    def divisor(self, step: Step) -> Tensor:
        """N [batch, 1]: the length with the token that is about to enter, or that token's index."""
        return (step.columns - step.padding + (0 if self.decode_by_position else 1)).clamp_min(1)[:, None]


class Algorithm1(PolicyRule):
    """The token that leaves the window is classified; the least significant one of its new tier may have to go."""

    def step(self, step: Step) -> Iterable[Move]:
        column = step.columns - self.window
        if column < 0:
            return
        significance, divisor = self.current(step), self.divisor(step)
        leaves = (step.tier[..., column] != DROPPED) & (column >= step.padding)[:, None]
        tier = self.classify(significance[..., column], divisor)
        yield Move(torch.full_like(tier, column, dtype=torch.long), tier, leaves & (tier != step.tier[..., column]))

        older = torch.arange(step.columns, device=tier.device) < column
        peers = older & (step.tier == tier[..., None]) & (leaves & (tier != DROPPED))[..., None]
        victim, least, found = smallest(significance, peers)
        fate = self.classify(least, divisor)
        # A victim is never promoted: it stays, moves down or goes.
        yield Move(victim, fate, found & ((fate > tier) | (fate == DROPPED)))


class TwoMinimum(PolicyRule):
    """The released code: of the older tokens, the least of the high tier against the least of the low tier.

    What leaves the window is not looked at by itself; it only becomes eligible. A low token goes only where
    a demoted one takes its place.
    """

    def step(self, step: Step) -> Iterable[Move]:
        if step.columns < self.window:
            return
        significance, divisor = self.current(step), self.divisor(step)
        high_threshold, low_threshold = (alpha / divisor for alpha in self.alphas)
        eligible = torch.arange(step.columns, device=significance.device) <= step.columns - self.window
        high, least_high, has_high = smallest(significance, eligible & (step.tier == 0))
        low, least_low, has_low = smallest(significance, step.tier == 1)

        prune = has_high & (least_high < low_threshold) & (least_high < least_low)
        demote = has_high & ~prune & (least_high < high_threshold)
        evict = demote & has_low & (least_low < low_threshold)
        one = torch.ones_like(step.tier[..., 0])
        yield Move(low, one * DROPPED, evict)
        yield Move(high, torch.where(prune, one * DROPPED, one), prune | demote)


RULES = {"algorithm-1": Algorithm1, "two-minimum": TwoMinimum}
