"""Memory managers on the host, to compare the one on the device with (Figure 13).

The paper's own is described in a sentence and not published. What any manager on the host must do: every step the
tokens of each head, which only the device knows, come to it; every step the page table entries that changed go back.
Both managers here do the work of :class:`~diffkv_repro.diffkv.memory.PagedMemory` and hand out the same pages. Where
there is a choice it is theirs: copies go through page-locked memory, a prompt's tables are sent once, after compaction,
and released rows are not cleared on the device.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import OutOfPages


class CpuManager(ABC):
    """Page tables and the free list on the host; a copy of the tables, and the lengths, on ``device``.

    ``device_tables`` int32 [n_tables, max_requests, layers, kv_heads, entries] is what attention would read, and
    ``device_lengths`` int32 [max_requests, layers, kv_heads, tiers] what it would count in. ``tables``,
    ``page_counts`` and ``lengths`` are the host's, as numpy arrays of the same shapes. Sizes as for ``PagedMemory``.
    """

    def __init__(
        self, layouts: Sequence[PageLayout], *, pages: int, layers: int, kv_heads: int, max_requests: int,
        max_tokens: int, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.device, self.pages = torch.device(device), pages
        self.tier_tokens = np.array([layout.tokens for layout in layouts], dtype=np.int32)
        self.spare = len(layouts) - 1
        entries = -(-max_tokens // int(self.tier_tokens.min())) + self.spare
        heads = (max_requests, layers, kv_heads)
        self._tables = self._on_host((-(-len(layouts) // 2), *heads, entries), -1)
        self._lengths = self._on_host((*heads, len(layouts)), 0)
        self._planned = self._on_host((*heads, len(layouts)), 0)
        self._index = self._on_host((max_requests * layers * kv_heads * len(layouts),), 0, torch.int64)
        self._page = self._on_host(tuple(self._index.shape), 0)
        self.tables, self.lengths = self._tables.numpy(), self._lengths.numpy()
        self.page_counts = np.zeros_like(self.lengths)
        self.device_tables = self._tables.to(self.device, copy=True)
        self.device_lengths = self._lengths.to(self.device, copy=True)
        self.ready = np.zeros(max_requests, dtype=bool)

    def admit(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Conservative allocation for prompts of ``tokens``. Raises :class:`OutOfPages` before anything is written."""
        held = [-(-count // int(self.tier_tokens.min())) + self.spare for count in tokens]
        needed = sum(held) * self.tables.shape[2] * self.tables.shape[3]
        if needed > self.free_pages:
            raise OutOfPages(needed, self.free_pages, 0)
        self._admit(list(slots), held)

    def compact(self, slots: Sequence[int], lengths: Tensor) -> None:
        """Keep what ``lengths`` int32 [n, layers, kv_heads, tiers], on the device, need; send the tables."""
        slots = list(slots)
        planned = self._planned[: len(slots)].copy_(lengths, non_blocking=True)
        self._synchronise()
        self.lengths[slots] = planned.numpy()
        self._compact(slots)
        self.ready[slots] = True
        self.device_lengths[slots] = lengths
        for first, last in _runs(slots):
            self.device_tables[:, first:last].copy_(self._tables[:, first:last], non_blocking=True)
        self._synchronise()

    def reserve_step(self, active: np.ndarray) -> int:
        """A page for every full tier of the requests in ``active`` bool [max_requests]; how many were taken.

        Raises :class:`OutOfPages` before anything is written.
        """
        self._lengths.copy_(self.device_lengths, non_blocking=True)
        self._synchronise()
        changed = self._step(active & self.ready)
        index, page = (host[:changed].to(self.device, non_blocking=True) for host in (self._index, self._page))
        self.device_tables.view(-1)[index] = page
        self._synchronise()
        return changed

    def release(self, slots: Sequence[int]) -> None:
        """All pages of ``slots`` back to the list."""
        slots = list(slots)
        self._release(slots)
        self.tables[:, slots] = -1
        self.page_counts[slots] = self.lengths[slots] = 0
        self.device_lengths[slots] = 0
        self.ready[slots] = False

    @property
    @abstractmethod
    def free_pages(self) -> int:
        """Pages in the list."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads that work."""

    @abstractmethod
    def _admit(self, slots: list[int], held: list[int]) -> None:
        """So many pages for each head of each slot."""

    @abstractmethod
    def _compact(self, slots: list[int]) -> None:
        """Pages as ``lengths`` ask for."""

    @abstractmethod
    def _step(self, active: np.ndarray) -> int:
        """Take pages; flat indices of the changed table entries into ``_index``, pages into ``_page``, their number."""

    @abstractmethod
    def _release(self, slots: list[int]) -> None:
        """Pages to the list, tier by tier."""

    def _on_host(self, shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class PythonManager(CpuManager):
    """A deque of free pages and loops over requests, layers, heads and tiers, as serving engines in Python had."""

    def __init__(self, *arguments, **sizes) -> None:
        super().__init__(*arguments, **sizes)
        self.queue = deque(range(self.pages))

    @property
    def free_pages(self) -> int:
        """Pages in the list."""
        return len(self.queue)

    @property
    def threads(self) -> int:
        """Python runs one at a time."""
        return 1

    def _heads(self, slots: Sequence[int]):
        _, _, layers, kv_heads, _ = self.tables.shape
        return ((slot, layer, head) for slot in slots for layer in range(layers) for head in range(kv_heads))

    def _admit(self, slots: list[int], held: list[int]) -> None:
        for slot, count in zip(slots, held, strict=True):
            for head in self._heads([slot]):
                self.tables[0][head][:count] = [self.queue.popleft() for _ in range(count)]
                self.page_counts[head][0] = count

    def _compact(self, slots: list[int]) -> None:
        entries, sizes = self.tables.shape[-1], self.tier_tokens.tolist()
        for head in self._heads(slots):
            rows, counts = [table[head] for table in self.tables], self.page_counts[head]
            pages = rows[0][: counts[0]].tolist()
            rows[0][: counts[0]] = -1
            for tier, tokens in enumerate(self.lengths[head].tolist()):
                count = counts[tier] = -(-tokens // sizes[tier])
                if tier % 2 == 0:
                    rows[tier // 2][:count] = pages[:count]
                    pages = pages[count:]
                else:
                    rows[tier // 2][entries - count :] = pages[len(pages) - count :]
                    pages = pages[: len(pages) - count]
            self.queue.extend(pages)

    def _step(self, active: np.ndarray) -> int:
        _, requests, layers, kv_heads, entries = self.tables.shape
        rows, sizes, wanted = requests * layers * kv_heads, self.tier_tokens.tolist(), []
        for slot in np.flatnonzero(active).tolist():
            for layer in range(layers):
                for head in range(kv_heads):
                    counts = self.page_counts[slot, layer, head].tolist()
                    for tier, tokens in enumerate(self.lengths[slot, layer, head].tolist()):
                        if tokens >= counts[tier] * sizes[tier]:
                            place = entries - 1 - counts[tier] if tier % 2 else counts[tier]
                            wanted.append((slot, layer, head, tier, place))
        if len(wanted) > len(self.queue):
            raise OutOfPages(len(wanted), len(self.queue), 0)
        for i, (slot, layer, head, tier, place) in enumerate(wanted):
            page = self.queue.popleft()
            self.tables[tier // 2, slot, layer, head, place] = page
            self.page_counts[slot, layer, head, tier] += 1
            row = (slot * layers + layer) * kv_heads + head
            self._index[i] = (tier // 2 * rows + row) * entries + place
            self._page[i] = page
        return len(wanted)

    def _release(self, slots: list[int]) -> None:
        entries = self.tables.shape[-1]
        for head in self._heads(slots):
            for tier, count in enumerate(self.page_counts[head].tolist()):
                row = self.tables[tier // 2][head]
                self.queue.extend(row[entries - count :][::-1].tolist() if tier % 2 else row[:count].tolist())


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Consecutive slots, as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot:
            runs[-1] = runs[-1][0], slot + 1
        else:
            runs.append((slot, slot + 1))
    return runs
