"""``TieredLayer``: tokens at different precisions or dropped, as a rule decides, in prompt and generation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.storages import make_store
from diffkv_repro.cache.store import DROPPED, TokenStore
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


_MOVE = ("column", "tier", "where")


class TierRule(ABC):
    """Which tier each token belongs to. A rule keeps no state of a request: the store and ``Step`` have it all.

    ``precisions`` are the tiers. ``score_width`` is how many running scores a stored token carries: 0, 1 (the maximum
    over the query heads of its KV head, step by step) or the number of query heads of a KV head.
    ``own_score`` says whether the score a token gives itself counts. ``newcomer`` is the tier of a token as it enters
    in generation. ``decides`` is False for rules that leave
    stored tokens alone in generation, so that many new tokens can be taken in at once.
    """

    precisions: tuple[Precision, ...]
    score_width: int = 0
    own_score: bool = False
    decides: bool = False
    newcomer: int = 0

    @abstractmethod
    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        """Tiers int8 [batch, kv_heads, tokens] of a prompt; padding is dropped for the rule."""

    def prompt_scores(self, prompt: PromptAttention) -> Tensor | None:
        """Running scores at the end of the prompt, [batch, kv_heads, score_width, tokens]; None for none."""
        return None

    def step(self, step: "Step") -> Iterable[Move]:
        """What happens to stored tokens before the next one enters; the moves are of different tokens."""
        return ()


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
        store, first = self.store, self.store.columns
        tier = self.rule.newcomer
        encoded = store.encode(self._forward(call.key, rows.positions[:, first:]), call.value, tier)
        if not self.rule.decides and self.rule.score_width == 0:
            store.append_encoded(encoded, tier)
            return self._attended(call, rows)
        outputs = []
        for index in range(count):
            # Decide, store, attend, score: in this order, as the released DiffKV code does.
            self._decide(rows)
            store.append_encoded([part[:, :, index : index + 1] for part in encoded], tier)
            one = AttentionCall(
                call.layer, *(t[:, :, index : index + 1] for t in (call.query, call.key, call.value)),
                call.scale, call.window, call.softcap,
            )  # fmt: skip
            outputs.append(self._attended(one, Rows(rows.padding, rows.positions[:, : first + index + 1])))
        return torch.cat(outputs, dim=2) if count > 1 else outputs[0]

    def dense(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [batch, kv_heads, columns, head_dim] as attention sees them, and where there are any."""
        key, value = self.store.view()
        if self._transform is not None:
            key = self._transform.inverse(key, rows.positions[:, : key.shape[2]])
        return key, value, self.store.tier != DROPPED

    def round_trip(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What new tokens at ``positions`` [batch, n] would look like to attention; a simulated store only."""
        key, value = self.store.encode(self._forward(key, positions), value, self.rule.newcomer)
        return key if self._transform is None else self._transform.inverse(key, positions), value

    def kv_bytes(self, rows: Rows) -> KVBytes:
        return self.store.kv_bytes(rows.padding)

    def select(self, rows: Tensor) -> None:
        self.store.select(rows)

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for precision, counts in zip(self.rule.precisions, self.store.counts().tolist(), strict=True):
            before = found.get(str(precision), [0] * len(counts))  # two tiers may be of one precision
            found[str(precision)] = [old + new for old, new in zip(before, counts, strict=True)]
        return found

    def tensors(self) -> list[Tensor]:
        return self.store.tensors()

    def _decide(self, rows: Rows) -> None:
        """Let the rule change stored tokens, all its moves in one go."""
        if not self.rule.decides:
            return
        store = self.store
        tier = store.tier
        step = Step(store.columns, self._prompt_columns, tier, store.scores, self._padding(rows, len(tier)))
        moves = list(self.rule.step(step))
        if moves:
            store.retier(*(torch.stack([getattr(m, name) for m in moves], dim=-1) for name in _MOVE))

    def _attended(self, call: AttentionCall, rows: Rows) -> Tensor:
        """Attention of the newest tokens over the store, and the scores that come of it."""
        store, rule = self.store, self.rule
        output, weights = attend(call, *self.dense(rows))
        if rule.score_width:
            scores = weights[:, :, :, 0]
            if rule.score_width == 1:
                scores = scores.amax(dim=2, keepdim=True)
            if not rule.own_score:
                scores[..., -1] = 0
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
