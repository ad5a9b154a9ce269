"""``TokenStore``: the tokens of one layer, each at its own precision, in every sequence and KV head.

Two storages hold the same numbers bit for bit. :class:`SimulatedStore` keeps what dequantisation would give;
:class:`PackedStore` (its own file) keeps the bytes. This base class keeps the tiers and counts the bytes of both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.precision import Precision
from diffkv_repro.core.vectors import VectorCodec

DROPPED = -1
CHUNK = 32  # records a pool grows by


class TokenStore(ABC):
    """Tokens in columns: column j holds the j-th token of every sequence, or nothing in heads that dropped it.

    ``tier`` int8 [batch, kv_heads, columns] is an index into ``precisions``, or DROPPED. ``score_width`` numbers
    of float32 go with each stored token.
    """

    def __init__(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        precisions: Sequence[Precision],
        score_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        self.shape = (batch, kv_heads, head_dim)
        self.precisions = tuple(precisions)
        self.codecs = [
            tuple(VectorCodec(head_dim, bits, groups, half) for bits, groups in _halves(precision))
            for precision in self.precisions
        ]
        self.score_width = score_width
        self.dtype = dtype
        self.device = device
        self.columns = 0
        self._used = [0] * len(self.precisions)
        self._reserved = [0] * len(self.precisions)

    @property
    @abstractmethod
    def tier(self) -> Tensor:
        """int8 [batch, kv_heads, columns]."""

    @property
    @abstractmethod
    def scores(self) -> Tensor:
        """float32 [batch, kv_heads, score_width, columns]; 0 for dropped tokens."""

    @abstractmethod
    def append(self, key: Tensor, value: Tensor, tier: Tensor | int) -> None:
        """Store ``key``, ``value`` [batch, kv_heads, n, head_dim] in new columns at ``tier`` [batch, kv_heads, n]."""

    @abstractmethod
    def encode(self, key: Tensor, value: Tensor, tier: int) -> tuple[Tensor, ...]:
        """What :meth:`append_encoded` takes: many tokens made ready at once, each [batch, kv_heads, n, ...]."""

    @abstractmethod
    def append_encoded(self, parts: Sequence[Tensor], tier: int) -> None:
        """Store tokens that :meth:`encode` has made ready, in new columns."""

    @abstractmethod
    def retier(self, column: Tensor, tier: Tensor, where: Tensor) -> None:
        """Store one token of each head, or several different ones, anew at another tier, or drop them.

        ``column``, ``tier``, ``where`` are [batch, kv_heads] or [batch, kv_heads, m]; where ``where`` is False nothing
        happens. The new codes are made from the old dequantised values, the original ones being gone.
        """

    @abstractmethod
    def add_scores(self, scores: Tensor) -> None:
        """Add ``scores`` [batch, kv_heads, score_width, columns] to those of stored tokens."""

    @abstractmethod
    def view(self) -> tuple[Tensor, Tensor]:
        """Dequantised keys and values, [batch, kv_heads, columns, head_dim]; 0 for dropped tokens."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` (repeats allowed), in that order: beam search."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What a packed storage has allocated; empty for a simulated one."""

    def counts(self) -> Tensor:
        """Tokens at each tier, [tiers, kv_heads], over all sequences."""
        return torch.stack([(self.tier == index).sum(dim=(0, 2)) for index in range(len(self.precisions))])

    def kv_bytes(self, padding: Tensor | None) -> KVBytes:
        """Bytes of this store; ``padding`` [batch] columns of left padding."""
        batch, kv_heads, head_dim = self.shape
        padded = 0 if padding is None else int(padding.sum()) * kv_heads
        stored = sum(self._used)
        entries = batch * kv_heads * self.columns
        total = KVBytes(
            scores=4 * self.score_width * stored,
            positions=4 * stored,
            tables=4 * (entries - padded - stored),
            padding=4 * (batch * kv_heads * self._reserved_columns() - entries + padded),
            full=4 * head_dim * (entries - padded),
        )
        for precision, (key, value), used, reserved in zip(
            self.precisions, self.codecs, self._used, self._reserved, strict=True
        ):
            bits = head_dim * (precision.key_bits + precision.value_bits)
            record = key.code_bytes + value.code_bytes + 2 * (key.params + value.params)
            payload = used * bits // 8
            total += KVBytes(
                payload=payload,
                scales=used * 2 * (key.params + value.params),
                padding=used * (key.code_bytes + value.code_bytes) - payload
                + (reserved - used) * (record + 4 * self.score_width),
            )  # fmt: skip
        return total

    def _reserved_columns(self) -> int:
        return -(-self.columns // CHUNK) * CHUNK

    def _take(self, tier: int, count: int) -> None:
        """Count ``count`` new records of ``tier``; the pool grows by whole chunks and never shrinks."""
        self._used[tier] += count
        self._reserved[tier] = max(self._reserved[tier], -(-self._used[tier] // CHUNK) * CHUNK)

    def _give(self, tier: int, count: int) -> None:
        self._used[tier] -= count

    def _recount(self) -> None:
        """After the sequences changed: pools hold what is there, in whole chunks."""
        self._used = [int((self.tier == index).sum()) for index in range(len(self.precisions))]
        self._reserved = [-(-used // CHUNK) * CHUNK for used in self._used]


def _halves(precision: Precision) -> tuple[tuple[int, int], tuple[int, int]]:
    return (precision.key_bits, precision.key_groups), (precision.value_bits, precision.value_groups)
