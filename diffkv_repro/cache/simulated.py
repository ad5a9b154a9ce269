"""``SimulatedStore``: dequantised values instead of bytes; quicker, for accuracy sweeps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkv_repro.cache.store import DROPPED, TokenStore


class SimulatedStore(TokenStore):
    """Keeps for every token what decoding its bytes would give. Its bytes are counted, not allocated."""

    def __init__(self, **shape) -> None:
        super().__init__(**shape)
        batch, kv_heads, head_dim = self.shape
        self._tier = torch.empty(batch, kv_heads, 0, dtype=torch.int8, device=self.device)
        self._scores = torch.empty(batch, kv_heads, self.score_width, 0, device=self.device)
        self._key = torch.empty(batch, kv_heads, 0, head_dim, dtype=self.dtype, device=self.device)
        self._value = torch.empty_like(self._key)

    @property
    def tier(self) -> Tensor:
        return self._tier[:, :, : self.columns]

    @property
    def scores(self) -> Tensor:
        return self._scores[..., : self.columns]

    def append(self, key: Tensor, value: Tensor, tier: Tensor | int) -> None:
        if isinstance(tier, int) and tier == DROPPED:
            tier = torch.full(key.shape[:3], DROPPED, dtype=torch.int8, device=self.device)
        if isinstance(tier, int):
            self.append_encoded(self.encode(key, value, tier), tier)
            return
        start = self._extend(key.shape[2])
        self._tier[:, :, start : self.columns] = tier
        for index, (keys, values) in enumerate(self.codecs):
            chosen = (tier == index).nonzero(as_tuple=True)
            at = (*chosen[:2], chosen[2] + start)
            self._key[at] = keys.round_trip(key[chosen], self.dtype)
            self._value[at] = values.round_trip(value[chosen], self.dtype)
            self._take(index, len(chosen[0]))

    def encode(self, key: Tensor, value: Tensor, tier: int) -> tuple[Tensor, ...]:
        keys, values = self.codecs[tier]
        return keys.round_trip(key, self.dtype), values.round_trip(value, self.dtype)

    def append_encoded(self, parts: Sequence[Tensor], tier: int) -> None:
        key, value = parts
        start = self._extend(key.shape[2])
        self._tier[:, :, start : self.columns] = tier
        self._key[:, :, start : self.columns], self._value[:, :, start : self.columns] = key, value
        self._take(tier, key[..., 0].numel())

    def retier(self, column: Tensor, tier: Tensor, where: Tensor) -> None:
        chosen = where.nonzero(as_tuple=True)
        if not len(chosen[0]):
            return
        row, head = chosen[:2]
        at, new = column[chosen], tier[chosen]
        old = self._tier[row, head, at]
        key, value = self._key[row, head, at], self._value[row, head, at]
        fresh_key, fresh_value = torch.zeros_like(key), torch.zeros_like(value)
        members = [(new == index).nonzero().flatten() for index in range(len(self.codecs))]
        for index in range(len(self.codecs)):
            self._give(index, int((old == index).sum()))
        for index, ((keys, values), own) in enumerate(zip(self.codecs, members, strict=True)):
            if len(own):
                fresh_key[own] = keys.round_trip(key[own], self.dtype)
                fresh_value[own] = values.round_trip(value[own], self.dtype)
                self._take(index, len(own))
        self._key[row, head, at], self._value[row, head, at] = fresh_key, fresh_value
        self._tier[row, head, at] = new
        if self.score_width:
            self._scores[row, head, :, at] *= (new != DROPPED)[:, None]

    def add_scores(self, scores: Tensor) -> None:
        self._scores[..., : self.columns] += scores * (self.tier != DROPPED)[:, :, None]

    def view(self) -> tuple[Tensor, Tensor]:
        return self._key[:, :, : self.columns], self._value[:, :, : self.columns]

    def select(self, rows: Tensor) -> None:
        for name in ("_tier", "_scores", "_key", "_value"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
        self.shape = (len(rows), *self.shape[1:])
        self._recount()

    def tensors(self) -> list[Tensor]:
        return []

    def _extend(self, count: int) -> int:
        """``count`` more columns; returns the first. Room grows by halves, so appending one by one stays linear."""
        start = self.columns
        self.columns += count
        extra = self.columns - self._tier.shape[2]
        if extra <= 0:
            return start
        extra = max(extra, self._tier.shape[2] // 2, 64) if start else extra
        pad = torch.nn.functional.pad
        self._tier = pad(self._tier, (0, extra), value=DROPPED)
        self._scores = pad(self._scores, (0, extra))
        self._key = pad(self._key, (0, 0, 0, extra))
        self._value = pad(self._value, (0, 0, 0, extra))
        return start
