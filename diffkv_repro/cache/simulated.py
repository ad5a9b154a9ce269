"""``SimulatedStore``: dequantised values instead of bytes; quicker, for accuracy sweeps."""

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
        start, stop = self.columns, self.columns + key.shape[2]
        self._grow(stop)
        self.columns = stop
        if isinstance(tier, int):
            self._tier[:, :, start:stop] = tier
            if tier == DROPPED:
                return
            keys, values = self.codecs[tier]
            self._key[:, :, start:stop] = keys.round_trip(key, self.dtype)
            self._value[:, :, start:stop] = values.round_trip(value, self.dtype)
            self._take(tier, key[..., 0].numel())
            return
        self._tier[:, :, start:stop] = tier
        for index, (keys, values) in enumerate(self.codecs):
            chosen = tier == index
            self._key[:, :, start:stop][chosen] = keys.round_trip(key[chosen], self.dtype)
            self._value[:, :, start:stop][chosen] = values.round_trip(value[chosen], self.dtype)
            self._take(index, int(chosen.sum()))

    def retier(self, column: Tensor, tier: Tensor, where: Tensor) -> None:
        if not bool(where.any()):
            return
        row, head = where.nonzero(as_tuple=True)
        at, new = column[row, head], tier[row, head]
        old = self._tier[row, head, at]
        key, value = self._key[row, head, at], self._value[row, head, at]
        fresh_key, fresh_value = torch.zeros_like(key), torch.zeros_like(value)
        for index, (keys, values) in enumerate(self.codecs):
            chosen = new == index
            fresh_key[chosen] = keys.round_trip(key[chosen], self.dtype)
            fresh_value[chosen] = values.round_trip(value[chosen], self.dtype)
            self._give(index, int((old == index).sum()))
        for index in range(len(self.codecs)):
            self._take(index, int((new == index).sum()))
        self._key[row, head, at], self._value[row, head, at] = fresh_key, fresh_value
        self._tier[row, head, at] = new
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

    def _grow(self, columns: int) -> None:
        """Room for ``columns``, by halves, so that appending one by one stays linear."""
        extra = columns - self._tier.shape[2]
        if extra <= 0:
            return
        extra = max(extra, self._tier.shape[2] // 2, 64) if self.columns else extra
        pad = torch.nn.functional.pad
        self._tier = pad(self._tier, (0, extra), value=DROPPED)
        self._scores = pad(self._scores, (0, extra))
        self._key = pad(self._key, (0, 0, 0, extra))
        self._value = pad(self._value, (0, 0, 0, extra))
