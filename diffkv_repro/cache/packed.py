"""``PackedStore``: codes, scales and scores as the bytes they are, and a map that says where each token's are."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffkv_repro.cache.store import CHUNK, DROPPED, TokenStore


@dataclass
class _Pool:
    """Records of one tier, of all sequences and heads together, and the numbers of those that are free."""

    key_codes: Tensor
    key_params: Tensor
    value_codes: Tensor
    value_params: Tensor
    scores: Tensor
    free: list[int] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [self.key_codes, self.key_params, self.value_codes, self.value_params, self.scores]

    def grow(self, records: int) -> None:
        first = len(self.scores)
        for name in ("key_codes", "key_params", "value_codes", "value_params", "scores"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(records, *old.shape[1:])]))
        self.free.extend(range(first + records - 1, first - 1, -1))


class PackedStore(TokenStore):
    """One pool of records a tier. The map int32 [batch, kv_heads, columns] holds slot * tiers + tier, or -1.

    A token's column is its position, so the map entry also takes the place of a stored position.
    """

    def __init__(self, **shape) -> None:
        super().__init__(**shape)
        batch, kv_heads, _ = self.shape
        self._map = torch.empty(batch, kv_heads, 0, dtype=torch.int32, device=self.device)
        self._pools = [self._empty_pool(index) for index in range(len(self.precisions))]

    @property
    def tier(self) -> Tensor:
        entry = self._entries()
        return torch.where(entry < 0, DROPPED, entry % len(self._pools)).to(torch.int8)

    @property
    def scores(self) -> Tensor:
        entry = self._entries()
        dense = torch.zeros(*entry.shape, self.score_width, device=self.device)
        for index, pool in enumerate(self._pools):
            chosen = self._of(entry, index)
            dense[chosen] = pool.scores[self._slots(entry[chosen])]
        return dense.transpose(-1, -2)

    def append(self, key: Tensor, value: Tensor, tier: Tensor | int) -> None:
        if isinstance(tier, int) and tier == DROPPED:
            tier = torch.full(key.shape[:3], DROPPED, dtype=torch.int8, device=self.device)
        if isinstance(tier, int):
            self.append_encoded(self.encode(key, value, tier), tier)
            return
        start = self._extend(key.shape[2])
        for index in range(len(self._pools)):
            chosen = tier == index
            slots = self._write(index, *self._encoded_rows(index, key[chosen], value[chosen]))
            self._map[:, :, start : self.columns][chosen] = self._entry(slots, index)

    def encode(self, key: Tensor, value: Tensor, tier: int) -> tuple[Tensor, ...]:
        parts = self._encoded_rows(tier, key.flatten(0, 2), value.flatten(0, 2))
        return tuple(part.unflatten(0, key.shape[:3]) for part in parts)

    def append_encoded(self, parts: Sequence[Tensor], tier: int) -> None:
        shape = parts[0].shape[:3]
        start = self._extend(shape[2])
        slots = self._write(tier, *(part.flatten(0, 2) for part in parts))
        self._map[:, :, start : self.columns] = self._entry(slots, tier).view(shape)

    def retier(self, column: Tensor, tier: Tensor, where: Tensor) -> None:
        selected = where.nonzero(as_tuple=True)
        if not len(selected[0]):
            return
        row, head = selected[:2]
        at, new = column[selected], tier[selected]
        old = self._map[row, head, at]
        moved = []
        for index, pool in enumerate(self._pools):
            chosen = self._of(old, index)
            slots = self._slots(old[chosen])
            moved.append((chosen, *self._read(index, slots), pool.scores[slots]))
            self._give(index, len(slots))
            pool.free.extend(slots.tolist())
        entry = torch.full_like(old, -1)
        key, value, scores = self._joined(len(old), moved)
        for index, pool in enumerate(self._pools):
            chosen = new == index
            slots = self._write(index, *self._encoded_rows(index, key[chosen], value[chosen]))
            pool.scores[slots] = scores[chosen]
            entry[chosen] = self._entry(slots, index)
        self._map[row, head, at] = entry

    def add_scores(self, scores: Tensor) -> None:
        entry = self._entries()
        for index, pool in enumerate(self._pools):
            chosen = self._of(entry, index)
            pool.scores[self._slots(entry[chosen])] += scores.transpose(-1, -2)[chosen]

    def view(self) -> tuple[Tensor, Tensor]:
        entry = self._entries()
        key = torch.zeros(*entry.shape, self.shape[2], dtype=self.dtype, device=self.device)
        value = torch.zeros_like(key)
        for index in range(len(self._pools)):
            chosen = self._of(entry, index)
            key[chosen], value[chosen] = self._read(index, self._slots(entry[chosen]))
        return key, value

    def select(self, rows: Tensor) -> None:
        entry = self._map.index_select(0, rows)
        self.shape = (len(rows), *self.shape[1:])
        before, self._pools = self._pools, [self._empty_pool(index) for index in range(len(self._pools))]
        fresh = torch.full_like(entry, -1)
        for index, (old, pool) in enumerate(zip(before, self._pools, strict=True)):
            # A sequence that goes on twice needs its records twice: from here on they change apart.
            chosen = self._of(entry, index)
            slots = self._slots(entry[chosen])
            pool.grow(-(-len(slots) // CHUNK) * CHUNK)
            taken = self._slots_of_pool(pool, len(slots))
            for new, source in zip(pool.tensors(), old.tensors(), strict=True):
                new[taken] = source[slots]
            fresh[chosen] = self._entry(taken, index)
        self._map = fresh
        self._recount()

    def tensors(self) -> list[Tensor]:
        return [self._map, *(tensor for pool in self._pools for tensor in pool.tensors())]

    def _entries(self) -> Tensor:
        return self._map[:, :, : self.columns]

    def _of(self, entry: Tensor, tier: int) -> Tensor:
        return (entry >= 0) & (entry % len(self._pools) == tier)

    def _slots(self, entry: Tensor) -> Tensor:
        return (entry // len(self._pools)).long()

    def _entry(self, slots: Tensor, tier: int) -> Tensor:
        return (slots * len(self._pools) + tier).to(torch.int32)

    def _extend(self, count: int) -> int:
        start = self.columns
        self.columns += count
        missing = self._reserved_columns() - self._map.shape[2]
        self._map = torch.nn.functional.pad(self._map, (0, missing), value=-1)
        return start

    def _encoded_rows(self, tier: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        keys, values = self.codecs[tier]
        return (*keys.encode(key), *values.encode(value))

    def _write(self, tier: int, *parts: Tensor) -> Tensor:
        """Put encoded rows into free records of a pool, with scores of 0; returns their slots."""
        before = self._reserved[tier]
        self._take(tier, len(parts[0]))
        pool = self._pools[tier]
        pool.grow(self._reserved[tier] - before)
        slots = self._slots_of_pool(pool, len(parts[0]))
        for stored, part in zip(pool.tensors(), parts, strict=False):
            stored[slots] = part
        pool.scores[slots] = 0
        return slots

    def _read(self, tier: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        pool, (keys, values) = self._pools[tier], self.codecs[tier]
        return (
            keys.decode(pool.key_codes[slots], pool.key_params[slots], self.dtype),
            values.decode(pool.value_codes[slots], pool.value_params[slots], self.dtype),
        )

    def _joined(self, count: int, parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of several tiers in one order."""
        key = torch.zeros(count, self.shape[2], dtype=self.dtype, device=self.device)
        value, scores = torch.zeros_like(key), torch.zeros(count, self.score_width, device=self.device)
        for chosen, own_key, own_value, own_scores in parts:
            key[chosen], value[chosen], scores[chosen] = own_key, own_value, own_scores
        return key, value, scores

    def _slots_of_pool(self, pool: _Pool, count: int) -> Tensor:
        taken = [pool.free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.long, device=self.device)

    def _empty_pool(self, tier: int) -> _Pool:
        keys, values = self.codecs[tier]

        def rows(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(0, width, dtype=dtype, device=self.device)

        return _Pool(
            rows(keys.code_bytes, torch.uint8),
            rows(keys.params, torch.float16),
            rows(values.code_bytes, torch.uint8),
            rows(values.params, torch.float16),
            rows(self.score_width, torch.float32),
        )
