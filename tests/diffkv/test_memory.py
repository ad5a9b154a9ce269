import re

import pandas as pd
import pytest
import torch
from memory_helpers import (
    assert_matches,
    assert_same,
    assert_sound,
    everything,
    free_pages,
    make,
    oracle_of,
    random_plan,
)

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout, table_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.memory_example import figure_6, inspect_pages


def plan(memory, *heads):
    """Lengths of one request, head by head."""
    return torch.tensor(heads, dtype=torch.int32).view(1, *memory.lengths.shape[1:])


def test_figure_6_is_reproduced_page_by_page():
    memory, slot, (before, allocated, compacted) = figure_6()
    assert before.free == (5, 6, 7, 8, 9, 10, 11, 12)
    assert allocated.tables == ((5, 6, 7, 8, -1, -1, -1), (9, 10, 11, 12, -1, -1, -1))
    # Nothing is free: head and tail are equal, as they are when everything is.
    assert (allocated.head, allocated.tail, allocated.free) == (0, 0, ())
    assert compacted.tables == ((5, -1, -1, -1, -1, -1, 8), (9, 10, -1, -1, -1, -1, 12))
    assert compacted.free == (6, 7, 11)
    assert compacted.slots == (6, 7, 11, *[None] * 10)
    assert (compacted.head, compacted.tail) == (0, 3)
    assert_sound(memory)
    seen = inspect_pages(memory, slot)
    assert seen[["head", "tier", "page", "tokens"]].values.tolist() == [
        [0, 0, 5, 2], [0, 1, 8, 4], [1, 0, 9, 2], [1, 0, 10, 2], [1, 1, 12, 3]
    ]  # fmt: skip


def test_figure_6_has_no_page_to_spare_for_seven_high_tokens_and_one_low():
    memory, slot, _ = figure_6()
    memory.release([slot])
    memory.admit([slot], [8])
    before = everything(memory)
    with pytest.raises(ValueError, match=re.escape("has 5 pages to keep for [7, 1] tokens, but holds 4")):
        memory.compact([slot], plan(memory, (7, 1), (8, 0)))
    assert_same(before[0], everything(memory)[0])


def test_inspector_names_every_page_of_a_request():
    memory = make(4, pages=200)
    memory.admit([0, 2], [16, 9])
    memory.compact([2], plan(memory, (2, 4, 0, 3), (0, 0, 0, 0), (5, 0, 4, 0), (9, 0, 0, 0)))
    seen = inspect_pages(memory, 2)
    assert isinstance(seen, pd.DataFrame)
    assert len(seen) == int(memory.page_counts[2].sum())
    assert seen["tokens"].sum() == 27
    for row in seen.itertuples():
        assert row.page == memory.tables[row.table, 2, row.layer, row.head, row.entry]
    assert (seen["fill"] <= 100).all()
    assert set(inspect_pages(memory, 0)["tokens"]) == {0}  # allocated, not planned yet
    assert inspect_pages(memory, 1).empty
    with pytest.raises(ValueError, match="slot 3 does not exist; slots are 0 to 2"):
        inspect_pages(memory, 3)


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_any_number_of_tiers_shares_tables_two_by_two(tiers):
    memory = make(tiers, pages=300, max_tokens=40)
    assert memory.tables.shape[0] == -(-tiers // 2)
    oracle = oracle_of(memory)
    memory.admit([1, 0], [40, 33])
    oracle.admit(1, 40), oracle.admit(0, 33)
    lengths = random_plan(memory, [40, 33], torch.Generator().manual_seed(tiers))
    memory.compact([1, 0], lengths)
    for k, slot in enumerate([1, 0]):
        oracle.compact(slot, {head: lengths[k, head[1], head[2]].tolist() for head in oracle.heads(slot)})
    assert_matches(memory, oracle)
    assert_sound(memory)


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9])
def test_conservative_allocation_holds_every_split(tiers, tokens):
    def splits(left, parts):
        if parts == 0:
            yield ()
            return
        for first in range(left + 1):
            yield from ((first, *rest) for rest in splits(left - first, parts - 1))

    memory = make(tiers)
    sizes = [layout.tokens for layout in memory.layouts]
    worst = max(sum(-(-n // t) for n, t in zip(split, sizes, strict=True)) for split in splits(tokens, tiers))
    open_pages = max(sum(n // t + 1 for n, t in zip(s, sizes, strict=True)) for s in splits(tokens - 1, tiers))
    assert worst <= memory.prompt_pages(tokens) == open_pages


def test_a_table_holds_max_tokens_however_they_are_spread():
    """The bound of ``entries`` is reached, and is enough for the page that each tier holds open."""
    memory = make(2, pages=100, layers=1, kv_heads=1, max_requests=1, max_tokens=9)
    sizes = [layout.tokens for layout in memory.layouts]
    memory.admit([0], [8])
    memory.compact([0], plan(memory, (8, 0)))
    assert memory.can_step()
    memory.reserve_step(torch.ones(1, dtype=torch.bool))
    assert int(memory.page_counts.sum()) == 8 // sizes[0] + 1 + 1 == memory.tables.shape[-1]
    assert memory.synchronize_counts() == 100 - 6
    memory.lengths[..., 0] += 2  # two tokens, and yet only one is allowed: the table has no room for the next
    before = everything(memory)[0]
    memory.reserve_step(torch.ones(1, dtype=torch.bool))
    assert int(memory.status) == 2
    before.pop("status")
    assert_same(before, everything(memory)[0])
    with pytest.raises(RuntimeError, match=re.escape("a page table was full (max_tokens is 9)")):
        memory.synchronize_counts()
    assert memory.synchronize_counts() == 94  # told once


def test_empty_and_full_lists_are_told_apart_where_head_meets_tail():
    memory = make(1, pages=8, layers=1, kv_heads=1, max_requests=1, max_tokens=16, watermark=0)
    for _ in range(3):
        assert memory.ring.tolist() == [0, 0, 8]
        memory.admit([0], [16])
        assert memory.ring.tolist() == [0, 0, 0]
        assert not memory.can_admit([1])
        assert_sound(memory)
        memory.release([0])
        assert_sound(memory)


def test_one_token_prompt_and_empty_batches():
    memory = make(2)
    memory.admit([], [])
    memory.compact([], memory.lengths[:0])
    memory.release([])
    memory.reserve_step(torch.zeros(3, dtype=torch.bool))
    assert memory.can_admit([])
    assert memory.ring.tolist() == [0, 0, 64]
    memory.admit([2], [1])
    assert memory.page_counts[2].tolist() == [[[2, 0]] * 2] * 2
    memory.compact([2], plan(memory, (1, 0), (0, 1), (0, 0), (1, 0)))
    assert memory.page_counts[2].tolist() == [[[1, 0], [0, 1]], [[0, 0], [1, 0]]]
    assert_sound(memory)


def test_nothing_of_a_request_is_left_for_the_next():
    def fingerprint(memory):
        memory.admit([1], [11])
        memory.compact([1], plan(memory, (3, 4), (0, 9), (11, 0), (0, 0)))
        memory.reserve_step(torch.tensor([False, True, False]))
        return [(memory.tables[:, 1] >= 0).tolist(), memory.lengths[1].tolist(), memory.page_counts[1].tolist()]

    fresh, used = make(2), make(2)
    used.admit([1], [16])
    used.compact([1], plan(used, *[(16, 0)] * 4))
    used.reserve_step(torch.ones(3, dtype=torch.bool))
    used.lengths[1, ..., 1] += 1
    used.release([1])
    assert bool((used.tables == -1).all())
    assert not used.lengths.any()
    assert not used.page_counts.any()
    assert fingerprint(fresh) == fingerprint(used)


def test_tensors_stay_where_they_are():
    memory = make(4, pages=300)
    names = ("pool", "free", "ring", "tables", "lengths", "page_counts", "status")
    places = [getattr(memory, name).data_ptr() for name in names]
    for _ in range(3):
        memory.admit([0, 1], [16, 3])
        memory.compact([0, 1], random_plan(memory, [16, 3], torch.Generator().manual_seed(0)))
        memory.reserve_step(torch.ones(3, dtype=torch.bool))
        memory.release([1, 0])
    assert places == [getattr(memory, name).data_ptr() for name in names]


def test_the_bound_of_the_host_counts_a_page_a_tier_and_page_of_steps():
    memory = make(2, pages=60, layers=1, kv_heads=2, max_requests=2, max_tokens=16, watermark=0)
    high, low = (layout.tokens for layout in memory.layouts)
    assert memory.can_step(1000)  # nobody takes part
    memory.admit([0], [8])
    memory.compact([0], plan(memory, (4, 1), (8, 0)))
    assert memory.free_bound == 60 - 2 * 5  # what compaction gave back is not known yet
    assert memory.synchronize_counts() == memory.free_bound == 60 - 3 - 4
    for steps in (1, 2, 3, 5, 9):
        taken = 2 * (1 + (steps - 1) // high) + 2 * (1 + (steps - 1) // low)
        assert memory._bound.free(steps) == 53 - taken
    assert memory.can_step(20)
    assert not memory.can_step(200)
    memory.count_steps(200)  # as a caller who replays a graph would
    assert not memory.can_step()
    assert memory.can_admit([16])  # looks at the device before it refuses
    assert memory.can_step()
    memory.release([0])
    assert memory.synchronize_counts() == 60


def test_bytes_add_up_to_what_is_held_and_to_what_is_allocated():
    memory = make(3, pages=200, max_tokens=40)
    memory.admit([0, 2], [40, 9])
    memory.compact([0], random_plan(memory, [40], torch.Generator().manual_seed(1)))
    share = (memory.tables.nbytes + memory.lengths.nbytes + memory.page_counts.nbytes) // 3
    for slots in ([0], [2], [2, 0], None):
        count = memory.kv_bytes(slots, tokens=[40] * len(slots or [0, 2]))
        held = int((memory.tables[:, slots if slots else [0, 2]] >= 0).sum())
        assert count.total == held * 256 + share * (len(slots) if slots else 2)
    alone = memory.kv_bytes([0], tokens=[40])
    stored = memory.lengths[0].sum(dim=(0, 1)).tolist()
    per_token = [layout.key_row_bytes + layout.value_row_bytes for layout in memory.layouts]
    assert alone.payload == sum(n * size for n, size in zip(stored, per_token, strict=True))
    assert alone.positions == alone.scores == 4 * sum(stored)
    assert alone.full == 2 * 2 * 32 * 4 * 40  # keys and values, FP16, channels, heads of all layers, tokens
    assert memory.kv_bytes([2]).payload == 0
    tensors = [memory.pool, *(value for value in vars(memory.state).values() if isinstance(value, torch.Tensor))]
    assert memory.allocated_bytes == sum(tensor.nbytes for tensor in tensors)
    with pytest.raises(ValueError, match="has no ratio"):
        _ = memory.kv_bytes().true_ratio


def test_tables_of_the_published_size():
    """32 MB for 32 layers, 8 heads and 128 requests at 8,192 tokens count no spare entry; ours have one a head."""
    layouts = [PageLayout(Precision.parse(name), 128, 6784) for name in ("K8V4", "K4V2")]
    memory = PagedMemory(layouts, pages=1, layers=32, kv_heads=8, max_requests=128, max_tokens=8192)
    published = table_bytes(layers=32, kv_heads=8, requests=128, tokens=8192, tokens_per_page=32)
    assert published == 32 * 2**20
    assert memory.tables.shape[-1] == 257
    assert memory.tables.nbytes == published * 257 // 256 == published + 128 * 2**10


def test_soak_of_a_million_page_operations():
    """A batch of random requests comes and goes through a pool that wraps many times; all pages stay accounted for."""
    generator = torch.Generator().manual_seed(7)
    memory = make(2, pages=150_000, layers=16, kv_heads=8, max_requests=64, max_tokens=64)
    moved, waiting, prompts = 0, [], {}
    for turn in range(40):
        empty = [slot for slot in range(64) if slot not in prompts and slot not in waiting]
        new = empty[: int(torch.randint(1, 40, (), generator=generator))]
        tokens = torch.randint(1, 60, (len(new),), generator=generator).tolist()
        while new and not memory.can_admit(tokens):
            new, tokens = new[:-1], tokens[:-1]
        before = memory.synchronize_counts()
        memory.admit(new, tokens)
        allocated = memory.synchronize_counts()
        memory.compact(new, random_plan(memory, tokens, generator))
        prompts |= dict(zip(new, tokens, strict=True))
        compacted = memory.synchronize_counts()
        active = torch.rand(64, generator=generator) < 0.7
        if memory.can_step():
            memory.reserve_step(active)
            room = memory.page_counts * memory.state.tier_tokens - memory.lengths
            grown = (torch.rand(room.shape, generator=generator) < 0.5) & (room > 0) & active[:, None, None, None]
            grown[[slot for slot in range(64) if prompts.get(slot, 64) >= 63]] = False
            grown[..., 1] &= ~grown[..., 0]
            memory.lengths += grown
            prompts = {slot: count + 1 for slot, count in prompts.items()}
        stepped = memory.synchronize_counts()
        gone = [slot for slot in prompts if torch.rand((), generator=generator) < 0.4 or prompts[slot] >= 62]
        memory.release(gone)
        prompts = {slot: count for slot, count in prompts.items() if slot not in gone}
        released = memory.synchronize_counts()
        moved += (before - allocated) + (compacted - allocated) + (compacted - stepped) + (released - stepped)
        if turn % 8 == 0:
            assert_sound(memory)
    memory.release(list(prompts))
    assert_sound(memory)
    assert memory.synchronize_counts() == 150_000
    assert free_pages(memory).tolist() != list(range(150_000))
    assert moved > 1_000_000
