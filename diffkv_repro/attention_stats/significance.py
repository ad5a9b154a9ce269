"""``Significance``: how much a stored token matters, from the scores it has received."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention


@dataclass(frozen=True)
class Significance:
    """Mean score over some queries, per query head; then the maximum over the query heads of a KV head.

    ``queries`` counted in the prompt: all ``later`` ones (DiffKV section 4), or the ``last`` ``observed`` ones (its
    released code; SnapKV). ``own_score``: whether the score that a token gives itself counts (released code: yes).
    """

    queries: Literal["later", "last"] = "later"
    observed: int = 64
    own_score: bool = False

    def __post_init__(self) -> None:
        if self.queries not in ("later", "last"):
            raise ValueError(f"queries is {self.queries!r}; allowed are later, last")
        if self.observed < 1:
            raise ValueError(f"observed is {self.observed}; it must be at least 1")
        if self.queries == "later" and self.own_score:
            raise ValueError("own_score goes with queries='last'; later queries do not include a token's own")

    def sums(self, prompt: PromptAttention) -> Tensor:
        """Scores received, [batch, kv_heads, group, tokens] in float32."""
        kv_heads = prompt.call.key.shape[1]
        if self.queries == "later":
            received = prompt.received
        else:
            rows = prompt.rows(self.observed)
            if not self.own_score:
                count = rows.shape[2]
                torch.diagonal(rows[..., rows.shape[-1] - count :], dim1=-2, dim2=-1).zero_()
            received = rows.sum(dim=2)
        return received.float().unflatten(1, (kv_heads, -1))

    def counts(self, columns: int, prompt_columns: int, device: torch.device) -> Tensor:
        """Queries that the sums of the first ``columns`` columns are over, [columns]; at least 1.

        ``prompt_columns`` of them were the prompt; each later one counts for all before it.
        """
        first = torch.arange(columns, device=device) + (0 if self.own_score else 1)
        if self.queries == "last":
            first = first.clamp_min(prompt_columns - self.observed)
        return (columns - first).clamp_min(1)

    def of_prompt(self, prompt: PromptAttention) -> Tensor:
        """Significance of every token of a prompt, [batch, kv_heads, tokens]."""
        sums = self.sums(prompt).amax(dim=2)
        return sums / self.counts(prompt.tokens, prompt.tokens, sums.device)
