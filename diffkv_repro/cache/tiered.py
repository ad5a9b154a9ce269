"""``TieredLayer``: tokens at different precisions or dropped, as a rule decides, in prompt and generation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.store import DROPPED, TokenStore, make_store
from diffkv_repro.cache.transforms import KeyTransform
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.precision import Precision
from diffkv_repro.models.hf import AttentionCall


@dataclass(frozen=True)
class Move:
    """Put the token in ``column`` of each head where ``where`` is True to ``tier``; all [batch, kv_heads]."""

    column: Tensor
    tier: Tensor
    where: Tensor


class TierRule(ABC):
    """Which tier each token belongs to. A rule keeps no state of a request: the store and ``Step`` have it all.

    ``precisions`` are the tiers. ``score_width`` is how many running scores a stored token carries: 0, 1 (the maximum
    over the query heads of its KV head, step by step) or the number of query heads of a KV head.
    ``own_score`` says whether the score a token gives itself counts. ``decides`` is False for rules that leave
    stored tokens alone in generation, so that many new tokens can be taken in at once.
    """

    precisions: tuple[Precision, ...]
    score_width: int = 0
    own_score: bool = False
    decides: bool = False

    @abstractmethod
    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        """Tiers int8 [batch, kv_heads, tokens] of a prompt; padding is dropped for the rule."""

    def prompt_scores(self, prompt: PromptAttention) -> Tensor | None:
        """Running scores at the end of the prompt, [batch, kv_heads, score_width, tokens]; None for none."""
        return None

    def step(self, step: "Step") -> Iterable[Move]:
        """What happens to stored tokens before the next one enters."""
        return ()

    def newcomer(self, columns: int) -> int:
        """Tier of a token as it enters in generation."""
        return 0


@dataclass(frozen=True)
class Step:
    """What a rule may look at before the token of column ``columns`` enters (``columns`` are stored already).

    ``tier`` [batch, kv_heads, columns]; ``scores`` [batch, kv_heads, score_width, columns]; ``padding`` [batch];
    ``prompt_columns`` of the prompt, padding included.
    """

    columns: int
    prompt_columns: int
    tier: Tensor
    scores: Tensor
    padding: Tensor


class TieredLayer(LayerCache):
    """A rule, a store, and a transform of the keys that are stored."""

    def __init__(
        self,
        place: Place,
        rule: TierRule,
        *,
        storage: Literal["simulated", "packed"],
        transform: KeyTransform | None = None,
    ) -> None:
        super().__init__(place)
        self.rule = rule
        self._storage = storage
        self._transform = transform
        self._prompt_columns = 0
        self.store: TokenStore | None = None

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        batch, kv_heads, tokens, head_dim = prompt.call.key.shape
        self.store = make_store(
            self._storage, batch=batch, kv_heads=kv_heads, head_dim=head_dim, precisions=self.rule.precisions,
            score_width=self.rule.score_width, dtype=self.place.dtype, device=self.place.device,
        )  # fmt: skip
        self._prompt_columns = tokens
        padding = self._padding(rows, batch)
        tier = self.rule.prompt(prompt, padding)
        if prompt.valid is not None:
            tier = tier.masked_fill(~prompt.valid[:, None], DROPPED)
        self.store.append(self._forward(prompt.call.key, rows.positions), prompt.call.value, tier)
        scores = self.rule.prompt_scores(prompt)
        if scores is not None:
            self.store.add_scores(scores.float())

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        count = call.query.shape[2]
        self.reads += count
        if not self.rule.decides and self.rule.score_width == 0:
            return self._advance(call, rows)
        first = rows.positions.shape[1] - count
        outputs = []
        for index in range(count):
            one = AttentionCall(
                call.layer, *(t[:, :, index : index + 1] for t in (call.query, call.key, call.value)),
                call.scale, call.window, call.softcap,
            )  # fmt: skip
            outputs.append(self._advance(one, Rows(rows.padding, rows.positions[:, : first + index + 1])))
        return torch.cat(outputs, dim=2) if count > 1 else outputs[0]

    def kv_bytes(self, rows: Rows) -> KVBytes:
        return self.store.kv_bytes(rows.padding)

    def select(self, rows: Tensor) -> None:
        self.store.select(rows)

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        names = [str(precision) for precision in self.rule.precisions]
        return dict(zip(names, self.store.counts().tolist(), strict=True))

    def tensors(self) -> list[Tensor]:
        return self.store.tensors()

    def _advance(self, call: AttentionCall, rows: Rows) -> Tensor:
        """Decide, store, attend, score: in this order (as the released DiffKV code does)."""
        store, rule = self.store, self.rule
        batch, _, count, _ = call.query.shape
        if rule.decides:
            step = Step(
                store.columns, self._prompt_columns, store.tier, store.scores, self._padding(rows, batch)
            )  # fmt: skip
            for move in rule.step(step):
                store.retier(move.column, move.tier, move.where)
        new = rows.positions[:, store.columns : store.columns + count]
        store.append(self._forward(call.key, new), call.value, rule.newcomer(store.columns))
        key, value = store.view()
        if self._transform is not None:
            key = self._transform.inverse(key, rows.positions)
        tier = store.tier
        output, weights = attend(call, key, value, tier != DROPPED)
        if rule.score_width:
            scores = weights[:, :, :, 0]
            if rule.score_width == 1:
                scores = scores.amax(dim=2, keepdim=True)
            if not rule.own_score:
                scores = torch.nn.functional.pad(scores[..., :-1], (0, 1))
            store.add_scores(scores)
        return output

    def _forward(self, key: Tensor, positions: Tensor) -> Tensor:
        return key if self._transform is None else self._transform.forward(key, positions)

    def _padding(self, rows: Rows, batch: int) -> Tensor:
        if rows.padding is not None:
            return rows.padding
        return torch.zeros(batch, dtype=torch.long, device=self.place.device)


class KeepAll(TierRule):
    """Every token at one precision."""

    def __init__(self, precision: Precision) -> None:
        self.precisions = (precision,)

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        batch, kv_heads, tokens, _ = prompt.call.key.shape
        return torch.zeros(batch, kv_heads, tokens, dtype=torch.int8, device=prompt.call.key.device)


def smallest(values: Tensor, among: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over the last dimension: index and value of the least of ``values`` where ``among``, and whether there is one."""
    masked = torch.where(among, values, torch.inf)
    value, index = masked.min(dim=-1)
    return index, value, among.any(dim=-1)


