"""``ManagerState``: the tensors of the memory manager, as its Triton kernels and their torch twins take them."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

BLOCK = 512
"""Counts that one program adds up. A step of 128 requests, 32 layers, 8 heads and 2 tiers is 128 programs."""

OUT_OF_PAGES, TABLE_FULL, BAD_LENGTHS = 1, 2, 4
"""Bits of ``status``: an operation found too few free pages, a table without room, or lengths that do not fit."""


@dataclass(frozen=True)
class ManagerState:
    """Everything on the device but the pages themselves (DiffKV section 5.2); allocated once.

    ``free`` int32 [pages], a circular list of page ids; ``ring`` int32 [3], its head (next to take), tail (next slot to
    recycle into) and count. ``status`` int32 [1], bits of what went wrong. ``tables`` int32
    [n_tables, max_requests, layers, kv_heads, entries]; ``lengths`` and ``page_counts`` int32
    [max_requests, layers, kv_heads, tiers]. ``ready`` uint8 [max_requests], 1 from compaction to release.
    ``tier_tokens`` int32 [tiers], tokens per page. ``offsets``, ``sums`` and ``snapshot`` are what the two halves of an
    operation pass on: prefix sums within a block, totals and faults of the blocks, and the ring before the operation.
    """

    free: Tensor
    ring: Tensor
    status: Tensor
    tables: Tensor
    lengths: Tensor
    page_counts: Tensor
    ready: Tensor
    tier_tokens: Tensor
    offsets: Tensor
    sums: Tensor
    snapshot: Tensor

    @classmethod
    def new(
        cls, *, tier_tokens: tuple[int, ...], pages: int, layers: int, kv_heads: int, max_requests: int, entries: int,
        device: torch.device | str,
    ) -> "ManagerState":  # fmt: skip
        """All pages free, in order; no request."""

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        tiers = len(tier_tokens)
        heads = (max_requests, layers, kv_heads)
        rows = max_requests * layers * kv_heads
        return cls(
            free=torch.arange(pages, dtype=torch.int32, device=device),
            ring=torch.tensor([0, 0, pages], dtype=torch.int32, device=device),
            status=full((1,), 0),
            tables=full((-(-tiers // 2), *heads, entries), -1),
            lengths=full((*heads, tiers), 0),
            page_counts=full((*heads, tiers), 0),
            ready=full((max_requests,), 0, torch.uint8),
            tier_tokens=torch.tensor(tier_tokens, dtype=torch.int32, device=device),
            offsets=full((rows,), 0),
            sums=full((2 * -(-rows * tiers // BLOCK),), 0),
            snapshot=full((3,), 0),
        )

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.free.numel()

    @property
    def tiers(self) -> int:
        """Tiers of a head."""
        return self.lengths.shape[-1]

    @property
    def entries(self) -> int:
        """Entries of a head's row in one table."""
        return self.tables.shape[-1]

    @property
    def heads(self) -> int:
        """KV heads of a request over all layers."""
        return self.tables.shape[2] * self.tables.shape[3]

    @property
    def rows(self) -> int:
        """KV heads of all request slots over all layers."""
        return self.tables.shape[1] * self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, item.name).nbytes for item in fields(self))
