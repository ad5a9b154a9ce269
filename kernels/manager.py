"""Triton kernels of the memory manager: all layers, heads, requests and tiers in two launches (DiffKV section 5.2).

The first launch of an operation counts pages, block by block, and keeps the ring as it was; the second adds up the
counts of the blocks before its own, which gives every head a slice of the circular list that is its own, and moves
pages. One program of the second launch writes the new ring, which no program of that launch reads. Nothing waits and
nothing depends on the order of programs, so the page ids are those of the torch twin
(``diffkv_repro.diffkv.manager_reference``), and no launch needs the host: grids depend on sizes only.
An operation that cannot be done as a whole sets ``status`` and writes nothing else.
"""

import triton
import triton.language as tl
from diffkv_repro.kernels.manager_state import BAD_LENGTHS, OUT_OF_PAGES, TABLE_FULL

_OUT_OF_PAGES = tl.constexpr(OUT_OF_PAGES)
_TABLE_FULL = tl.constexpr(TABLE_FULL)
_BAD_LENGTHS = tl.constexpr(BAD_LENGTHS)


@triton.jit
def _wrapped(position, pages):
    return tl.where(position >= pages, position - pages, position)


@triton.jit
def _write_sums(sums, blocks, ring, snapshot, count, faults):
    """Leave the block's count and faults for the second launch, and the ring as it is now."""
    block = tl.program_id(0)
    tl.store(sums + block, tl.sum(count, axis=0))
    tl.store(sums + blocks + block, tl.sum(faults, axis=0))
    if block == 0:
        item = tl.arange(0, 4)
        tl.store(snapshot + item, tl.load(ring + item, mask=item < 3, other=0), mask=item < 3)


@triton.jit
def _read_sums(sums, blocks, block, SUMS: tl.constexpr):
    """Count of the blocks before ``block``, of all blocks, and their faults."""
    index = tl.arange(0, SUMS)
    counts = tl.load(sums + index, mask=index < blocks, other=0)
    faults = tl.load(sums + blocks + index, mask=index < blocks, other=0)
    return tl.sum(tl.where(index < block, counts, 0), axis=0), tl.sum(counts, axis=0), tl.sum(faults, axis=0)


@triton.jit
def _needs_page(i, lengths, page_counts, active, ready, tier_tokens, total, per_request, TIERS: tl.constexpr):
    """Whether the last page of tier ``i`` (flat over requests, layers, heads and tiers) is full, and pages held."""
    inside = (i >= 0) & (i < total)
    request = i // per_request
    on = (tl.load(active + request, mask=inside, other=0) != 0) & (tl.load(ready + request, mask=inside, other=0) != 0)
    held = tl.load(page_counts + i, mask=inside, other=0)
    length = tl.load(lengths + i, mask=inside, other=0)
    capacity = tl.load(tier_tokens + i % TIERS, mask=inside, other=1)
    return (inside & on & (length >= held * capacity)).to(tl.int32), held


@triton.jit(do_not_specialize=["total", "per_request", "entries", "blocks"])
def count_step_kernel(
    lengths, page_counts, active, ready, tier_tokens, ring, snapshot, sums, total, per_request, entries, blocks,
    TIERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First launch of a generation step: pages that each block of tiers takes, and tables without room."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    need, held = _needs_page(i, lengths, page_counts, active, ready, tier_tokens, total, per_request, TIERS)
    # The tier that fills the same table from its other end, where there is one.
    tier = i % TIERS
    paired = (tier ^ 1) < TIERS
    other = tl.where(paired, i - tier + (tier ^ 1), -1)
    need_other, held_other = _needs_page(
        other, lengths, page_counts, active, ready, tier_tokens, total, per_request, TIERS
    )
    full = (need != 0) & (held + need + held_other + need_other > entries)
    _write_sums(sums, blocks, ring, snapshot, need, full.to(tl.int32))


@triton.jit(do_not_specialize=["total", "per_request", "entries", "blocks", "rows", "pages"])
def take_step_kernel(
    lengths, page_counts, active, ready, tier_tokens, ring, snapshot, sums, free, tables, status,
    total, per_request, entries, blocks, rows, pages,
    TIERS: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Second launch of a generation step: each tier that needs one takes its page."""
    block = tl.program_id(0)
    before, wanted, faults = _read_sums(sums, blocks, block, SUMS)
    head, count = tl.load(snapshot), tl.load(snapshot + 2)
    enough = wanted <= count
    allowed = enough & (faults == 0)
    i = block * SIZE + tl.arange(0, SIZE)
    need, held = _needs_page(i, lengths, page_counts, active, ready, tier_tokens, total, per_request, TIERS)
    taking = (need != 0) & allowed
    source = _wrapped(head + before + tl.cumsum(need, axis=0) - need, pages)
    page = tl.load(free + source, mask=taking, other=-1)
    tier = i % TIERS
    position = tl.where(tier % 2 == 0, held, entries - 1 - held)
    row = (tier // 2).to(tl.int64) * rows + i // TIERS
    tl.store(tables + row * entries + position, page, mask=taking)
    tl.store(page_counts + i, held + 1, mask=taking)
    if block == 0:
        if allowed:
            tl.store(ring, (head + wanted) % pages)
            tl.store(ring + 2, count - wanted)
        else:
            flags = tl.where(enough, 0, _OUT_OF_PAGES) | tl.where(faults == 0, 0, _TABLE_FULL)
            tl.store(status, tl.load(status) | flags)


@triton.jit(do_not_specialize=["n", "heads", "entries", "pages"])
def admit_kernel(
    plan, ring, free, tables, page_counts, n, heads, entries, pages, TIERS: tl.constexpr, ENTRIES: tl.constexpr
):
    """Prompt phase: lay the conservative allocation of one head into table 0 from the left.

    ``plan`` int32 [3 n + 1]: slots; pages that the requests before take; pages of one head; pages of all.
    """
    program = tl.program_id(0)
    k, inner = program // heads, program % heads
    slot, start = tl.load(plan + k), tl.load(plan + n + k)
    held, wanted = tl.load(plan + 2 * n + k), tl.load(plan + 3 * n)
    if wanted <= tl.load(ring + 2):
        entry = tl.arange(0, ENTRIES)
        source = _wrapped(tl.load(ring) + start + inner * held + entry, pages)
        page = tl.load(free + source, mask=entry < held, other=-1)
        row = slot.to(tl.int64) * heads + inner
        tl.store(tables + row * entries + entry, page, mask=entry < held)
        tl.store(page_counts + row * TIERS, held)


@triton.jit(do_not_specialize=["n", "pages"])
def advance_kernel(plan, ring, status, n, pages):
    """After :func:`admit_kernel`, which reads the ring: move the head of the list on."""
    wanted, count = tl.load(plan + 3 * n), tl.load(ring + 2)
    if wanted <= count:
        tl.store(ring, (tl.load(ring) + wanted) % pages)
        tl.store(ring + 2, count - wanted)
    else:
        tl.store(status, tl.load(status) | _OUT_OF_PAGES)


@triton.jit(do_not_specialize=["total", "heads", "blocks"])
def plan_compaction_kernel(
    slots, planned, page_counts, tier_tokens, ring, snapshot, offsets, sums, total, heads, blocks,
    TIERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First launch of compaction: pages that each head gives back, their prefix sum within a block."""
    q = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = q < total
    slot = tl.load(slots + q // heads, mask=inside, other=0).to(tl.int64)
    held = tl.load(page_counts + (slot * heads + q % heads) * TIERS, mask=inside, other=0)
    surplus = held
    faults = tl.zeros([SIZE], tl.int32)
    for tier in tl.static_range(TIERS):
        length = tl.load(planned + q.to(tl.int64) * TIERS + tier, mask=inside, other=0)
        capacity = tl.load(tier_tokens + tier)
        surplus -= tl.cdiv(length, capacity)
        faults += ((length < 0) | (length > held * capacity)).to(tl.int32)
    faults += (surplus < 0).to(tl.int32)
    tl.store(offsets + q, tl.cumsum(surplus, axis=0) - surplus, mask=inside)
    _write_sums(sums, blocks, ring, snapshot, surplus, faults)


@triton.jit(do_not_specialize=["heads", "entries", "blocks", "rows", "pages"])
def compact_kernel(
    slots, planned, lengths, page_counts, ready, tier_tokens, ring, snapshot, offsets, sums, free, tables, status,
    heads, entries, blocks, rows, pages,
    TIERS: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Second launch of compaction, one program a head: pages to their tiers' ends, those left over to the list."""
    q = tl.program_id(0)
    before, returned, faults = _read_sums(sums, blocks, q // SIZE, SUMS)
    tail, count = tl.load(snapshot + 1), tl.load(snapshot + 2)
    if faults == 0:
        slot = tl.load(slots + q // heads).to(tl.int64)
        row = slot * heads + q % heads
        entry = tl.arange(0, ENTRIES)
        allocated = tables + row * entries
        low = 0
        high = tl.load(page_counts + row * TIERS)
        first = tl.full([ENTRIES], -1, tl.int32)
        for table in tl.static_range((TIERS + 1) // 2):
            left = tl.cdiv(tl.load(planned + q.to(tl.int64) * TIERS + 2 * table), tl.load(tier_tokens + 2 * table))
            right = 0
            if 2 * table + 1 < TIERS:
                length = tl.load(planned + q.to(tl.int64) * TIERS + 2 * table + 1)
                right = tl.cdiv(length, tl.load(tier_tokens + 2 * table + 1))
            at_right = (entry >= entries - right) & (entry < entries)
            source = tl.where(entry < left, low + entry, high - entries + entry)
            page = tl.load(allocated + source, mask=(entry < left) | at_right, other=-1)
            if table == 0:
                first = page  # written last: this row is what the others are read from
            else:
                tl.store(tables + (table * rows.to(tl.int64) + row) * entries + entry, page, mask=entry < entries)
            low += left
            high -= right
        page = tl.load(allocated + low + entry, mask=entry < high - low, other=-1)
        target = _wrapped(tail + before + tl.load(offsets + q) + entry, pages)
        tl.store(free + target, page, mask=entry < high - low)
        tl.debug_barrier()  # other threads of the program may still be reading the row and the count
        tl.store(allocated + entry, first, mask=entry < entries)
        for tier in tl.static_range(TIERS):
            length = tl.load(planned + q.to(tl.int64) * TIERS + tier)
            tl.store(lengths + row * TIERS + tier, length)
            tl.store(page_counts + row * TIERS + tier, tl.cdiv(length, tl.load(tier_tokens + tier)))
        if q % heads == 0:
            tl.store(ready + slot, 1)
    if q == 0:
        if faults == 0:
            tl.store(ring + 1, (tail + returned) % pages)
            tl.store(ring + 2, count + returned)
        else:
            tl.store(status, tl.load(status) | _BAD_LENGTHS)


@triton.jit(do_not_specialize=["total", "heads", "blocks"])
def plan_release_kernel(
    slots, page_counts, ring, snapshot, offsets, sums, total, heads, blocks, TIERS: tl.constexpr, SIZE: tl.constexpr
):
    """First launch of release: pages that each head holds, their prefix sum within a block."""
    q = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = q < total
    slot = tl.load(slots + q // heads, mask=inside, other=0).to(tl.int64)
    held = tl.zeros([SIZE], tl.int32)
    for tier in tl.static_range(TIERS):
        held += tl.load(page_counts + (slot * heads + q % heads) * TIERS + tier, mask=inside, other=0)
    tl.store(offsets + q, tl.cumsum(held, axis=0) - held, mask=inside)
    _write_sums(sums, blocks, ring, snapshot, held, tl.zeros([SIZE], tl.int32))


@triton.jit(do_not_specialize=["heads", "entries", "blocks", "rows", "pages"])
def release_kernel(
    slots, lengths, page_counts, ready, ring, snapshot, offsets, sums, free, tables,
    heads, entries, blocks, rows, pages,
    TIERS: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Second launch of release, one program a head: its pages to the list tier by tier, its tables emptied."""
    q = tl.program_id(0)
    before, returned, _ = _read_sums(sums, blocks, q // SIZE, SUMS)
    tail, count = tl.load(snapshot + 1), tl.load(snapshot + 2)
    slot = tl.load(slots + q // heads).to(tl.int64)
    row = slot * heads + q % heads
    entry = tl.arange(0, ENTRIES)
    at = tail + before + tl.load(offsets + q)
    for tier in tl.static_range(TIERS):
        held = tl.load(page_counts + row * TIERS + tier)
        place = tables + ((tier // 2) * rows.to(tl.int64) + row) * entries
        place += entry if tier % 2 == 0 else entries - 1 - entry
        page = tl.load(place, mask=entry < held, other=-1)
        tl.store(free + _wrapped(at + entry, pages), page, mask=entry < held)
        at += held
        tl.debug_barrier()  # other threads of the program may still be reading the row and the count
        tl.store(place, tl.full([ENTRIES], -1, tl.int32), mask=entry < held)
    for tier in tl.static_range(TIERS):
        tl.store(lengths + row * TIERS + tier, 0)
        tl.store(page_counts + row * TIERS + tier, 0)
    if q % heads == 0:
        tl.store(ready + slot, 0)
    if q == 0:
        tl.store(ring + 1, (tail + returned) % pages)
        tl.store(ring + 2, count + returned)
