"""The memory manager on the host, compiled and on all cores: what Figure 13's should be compared with.

Threads own slices of the heads. Each counts what its slice takes or gives, the counts are added up, and each then
works in a slice of the circular list that is its own: the prefix sum of the device's manager, without locks.
"""

import numba
import numpy as np
import torch
from numba import njit, prange

from diffkv_repro.diffkv.cpu_manager import CpuManager
from diffkv_repro.diffkv.memory import OutOfPages


class NumbaManager(CpuManager):
    """Compiled loops over numpy arrays; ``chunks`` slices, four a thread by default so that they even out."""

    def __init__(self, *arguments, chunks: int | None = None, **sizes) -> None:
        super().__init__(*arguments, **sizes)
        # When numba starts its threads it changes how many torch uses, once and for the whole process.
        torch_threads = torch.get_num_threads()
        _start_threads(np.zeros(1))
        torch.set_num_threads(torch_threads)
        self.free = np.arange(self.pages, dtype=np.int32)
        self.head, self.tail, self._count = 0, 0, self.pages
        self._sums = np.zeros((chunks or 4 * self.threads) + 1, dtype=np.int64)

    @property
    def free_pages(self) -> int:
        """Pages in the list."""
        return self._count

    @property
    def threads(self) -> int:
        """Threads of numba."""
        return numba.get_num_threads()

    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables [n_tables, rows, entries], lengths and counts [rows, tiers], a row for each head of each request."""
        tables, _, _, _, entries = self.tables.shape
        tiers = self.lengths.shape[-1]
        return self.tables.reshape(tables, -1, entries), self.lengths.reshape(-1, tiers), self._counts()

    def _counts(self) -> np.ndarray:
        return self.page_counts.reshape(-1, self.page_counts.shape[-1])

    def _rows(self, slots: list[int]) -> np.ndarray:
        heads = self.tables.shape[2] * self.tables.shape[3]
        return (np.array(slots, dtype=np.int64)[:, None] * heads + np.arange(heads)).reshape(-1)

    def _admit(self, slots: list[int], held: list[int]) -> None:
        tables, _, counts = self._flat()
        rows = self._rows(slots)
        wanted = np.repeat(np.array(held, dtype=np.int64), len(rows) // max(1, len(slots)))
        ends = np.cumsum(wanted)
        _admit(rows, wanted, ends, tables[0], counts, self.free, self.head)
        self._move(taken=int(ends[-1]) if len(ends) else 0)

    def _compact(self, slots: list[int]) -> None:
        tables, lengths, counts = self._flat()
        given = _compact(self._rows(slots), tables, lengths, counts, self.tier_tokens, self.free, self.tail, self._sums)
        self._move(given=int(given))

    def _step(self, active: np.ndarray) -> int:
        tables, lengths, counts = self._flat()
        rows, work = self._rows(np.flatnonzero(active).tolist()), (self._index.numpy(), self._page.numpy(), self._sums)
        ring = self.free, self.head, self._count
        taken = int(_step(rows, tables, lengths, counts, self.tier_tokens, *ring, *work))
        if taken > self._count:
            raise OutOfPages(taken, self._count, 0)
        self._move(taken=taken)
        return taken

    def _release(self, slots: list[int]) -> None:
        tables, _, counts = self._flat()
        self._move(given=int(_release(self._rows(slots), tables, counts, self.free, self.tail, self._sums)))

    def _move(self, *, taken: int = 0, given: int = 0) -> None:
        self.head, self.tail = (self.head + taken) % self.pages, (self.tail + given) % self.pages
        self._count += given - taken


@njit(parallel=True, cache=True)
def _start_threads(nothing):
    for i in prange(nothing.size):
        nothing[i] = 0.0


@njit(parallel=True, cache=True)
def _admit(rows, wanted, ends, table, counts, free, head):
    pages = free.size
    for i in prange(rows.size):
        first = head + ends[i] - wanted[i]
        for j in range(wanted[i]):
            table[rows[i], j] = free[(first + j) % pages]
        counts[rows[i], 0] = wanted[i]


@njit(inline="always")
def _bounds(chunk, chunks, total):
    return chunk * total // chunks, (chunk + 1) * total // chunks


@njit(parallel=True, cache=True)
def _compact(rows, tables, lengths, counts, sizes, free, tail, sums):
    chunks, pages, entries, tiers = sums.size - 1, free.size, tables.shape[2], sizes.size
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        total = 0
        for i in range(first, last):
            total += counts[rows[i], 0]
            for tier in range(tiers):
                total -= (lengths[rows[i], tier] + sizes[tier] - 1) // sizes[tier]
        sums[chunk + 1] = total
    sums[0] = 0
    for chunk in range(chunks):
        sums[chunk + 1] += sums[chunk]
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        at = tail + sums[chunk]
        held = np.empty(entries, dtype=np.int32)
        for i in range(first, last):
            row = rows[i]
            low, high = 0, counts[row, 0]
            for j in range(high):
                held[j] = tables[0, row, j]
                tables[0, row, j] = -1
            for tier in range(tiers):
                count = (lengths[row, tier] + sizes[tier] - 1) // sizes[tier]
                counts[row, tier] = count
                for j in range(count):
                    if tier % 2 == 0:
                        tables[tier // 2, row, j] = held[low + j]
                    else:
                        tables[tier // 2, row, entries - 1 - j] = held[high - 1 - j]
                if tier % 2 == 0:
                    low += count
                else:
                    high -= count
            for j in range(low, high):
                free[at % pages] = held[j]
                at += 1
    return sums[chunks]


@njit(parallel=True, cache=True)
def _step(rows, tables, lengths, counts, sizes, free, head, available, index, page, sums):
    chunks, pages, entries, tiers = sums.size - 1, free.size, tables.shape[2], sizes.size
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        total = 0
        for i in range(first, last):
            for tier in range(tiers):
                total += lengths[rows[i], tier] >= counts[rows[i], tier] * sizes[tier]
        sums[chunk + 1] = total
    sums[0] = 0
    for chunk in range(chunks):
        sums[chunk + 1] += sums[chunk]
    if sums[chunks] > available:
        return sums[chunks]
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        at = sums[chunk]
        for i in range(first, last):
            row = rows[i]
            for tier in range(tiers):
                held = counts[row, tier]
                if lengths[row, tier] >= held * sizes[tier]:
                    place = held if tier % 2 == 0 else entries - 1 - held
                    taken = free[(head + at) % pages]
                    tables[tier // 2, row, place] = taken
                    counts[row, tier] = held + 1
                    index[at] = (tier // 2 * tables.shape[1] + row) * entries + place
                    page[at] = taken
                    at += 1
    return sums[chunks]


@njit(parallel=True, cache=True)
def _release(rows, tables, counts, free, tail, sums):
    chunks, pages, entries, tiers = sums.size - 1, free.size, tables.shape[2], counts.shape[1]
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        total = 0
        for i in range(first, last):
            for tier in range(tiers):
                total += counts[rows[i], tier]
        sums[chunk + 1] = total
    sums[0] = 0
    for chunk in range(chunks):
        sums[chunk + 1] += sums[chunk]
    for chunk in prange(chunks):
        first, last = _bounds(chunk, chunks, rows.size)
        at = tail + sums[chunk]
        for i in range(first, last):
            for tier in range(tiers):
                for j in range(counts[rows[i], tier]):
                    place = j if tier % 2 == 0 else entries - 1 - j
                    free[at % pages] = tables[tier // 2, rows[i], place]
                    at += 1
    return sums[chunks]
