"""H2O, the Heavy-Hitter Oracle (Zhang et al., NeurIPS 2023, arXiv:2306.14048).

Each head keeps the most recent tokens and the *heavy hitters* among the older ones: those with the highest sum of
attention scores received so far, the score that a token gives itself included. Sums run on in generation, where every
new token pushes out the older token with the least sum. The budget is set by the prompt and does not grow afterwards.

Defaults: half of the budget is recent and half heavy, as in the paper and its released code (which sets 10 % + 10 % of
the prompt). ``keep`` is 50 % here, the budget of DiffKV's comparisons. ``budget`` fixes a number of tokens instead, as
the released streaming code does.

Deviations:

- The released code runs one sequence of a model with as many KV heads as query heads. Where several query heads share a
  KV head they have to agree, so their sums are added up: the attention that the stored token receives in all.
- One running sum is kept for each query head (float32, counted in ``KVBytes.scores``); added up, one would do.
- Room is made before a token enters, so that no head ever holds more than its budget, the newest token included. So
  does the released evaluation code; Algorithm 1 of the paper attends over one token more and evicts afterwards.
- At least the newest token is kept, also where the share of a short prompt rounds to none.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Move, Step, TieredLayer, TierRule, smallest
from diffkv_repro.core.precision import Precision


@dataclass(frozen=True)
class H2O(Method):
    """Recent tokens and heavy hitters, equally many in each head.

    ``keep`` is the share of the prompt that a head may hold from then on; ``budget`` overrides it with a number of
    tokens. ``recent`` is the share of the budget that goes to the most recent tokens.
    """

    keep: float = 0.5
    recent: float = 0.5
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "recent"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are 0 to 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget is {self.budget}; allowed are whole numbers from 1, or None")

    @property
    def label(self) -> str:
        return f"H2O {self.keep * 100:g} %" if self.budget is None else f"H2O {self.budget} tokens"

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, _HeavyHitters(self, place.layout.group), storage=storage)

    def budgets(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens a head may hold, and how many of them are the most recent, for prompts of ``length`` [batch]."""
        if self.budget is None:
            total = (length.double() * self.keep).round().long().clamp_min(1)
        else:
            total = torch.full_like(length, self.budget)
        recent = (total.double() * self.recent).round().long().clamp_min(1)
        return total, torch.minimum(recent, total)


class _HeavyHitters(TierRule):
    precisions = (Precision(16, 16),)
    own_score = True
    decides = True

    def __init__(self, method: H2O, group: int) -> None:
        self.score_width = group
        self._method = method
        # Handed from prompt() to prompt_scores(), which follows at once: the sums cost as much as the attention.
        self._sums: tuple[PromptAttention, Tensor] | None = None

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        sums = accumulated_scores(prompt).unflatten(1, (prompt.call.key.shape[1], -1))
        self._sums = (prompt, sums)
        budget, recent = self._method.budgets(prompt.tokens - padding)
        column = torch.arange(prompt.tokens, device=sums.device)
        newest = column >= prompt.tokens - recent[:, None]
        older = (column >= padding[:, None]) & ~newest
        heavy = highest(sums.sum(dim=2), older[:, None], budget - recent)
        return torch.where(heavy | newest[:, None], 0, DROPPED).to(torch.int8)

    def prompt_scores(self, prompt: PromptAttention) -> Tensor:
        (seen, sums), self._sums = self._sums, None
        if seen is not prompt:
            raise RuntimeError("prompt_scores() is for the prompt that prompt() has just been given")
        return sums

    def step(self, step: Step) -> Iterable[Move]:
        budget, recent = self._method.budgets(step.prompt_columns - step.padding)
        stored = step.tier != DROPPED
        # The token about to enter is one of the recent ones.
        older = torch.arange(step.columns, device=stored.device) <= step.columns - recent[:, None]
        victim, _, found = smallest(step.scores.sum(dim=2), stored & older[:, None])
        full = stored.sum(dim=-1) >= budget[:, None]
        yield Move(victim, torch.full_like(victim, DROPPED, dtype=torch.int8), found & full)


def accumulated_scores(prompt: PromptAttention, block: int = 128) -> Tensor:
    """Sum of the scores each token gets in a prompt, its own included: [batch, heads, tokens] in float32.

    ``PromptAttention.received`` leaves out the own score. ``block`` queries are looked at together.
    """
    call, tokens = prompt.call, prompt.tokens
    total = torch.zeros(*call.query.shape[:3], dtype=torch.float64, device=call.query.device)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        seen = {name: getattr(call, name)[:, :, :stop] for name in ("query", "key", "value")}
        rows = PromptAttention(dataclasses.replace(call, **seen), prompt.padding).rows(stop - start)
        total[..., :stop] += rows.sum(dim=2)
    return total.float()


def highest(values: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The ``count`` [batch] highest of each head's ``values`` [batch, kv_heads, tokens] where ``among``, as booleans.

    The earlier of equal ones goes first. ``among`` has the shape of ``values`` or [batch, 1, tokens].
    """
    order = values.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return (rank < count[:, None, None]) & among
