"""Torch twins of the memory manager's kernels: same arguments, same page ids, on any device (DiffKV section 5.2)."""

import torch
from torch import Tensor

from diffkv_repro.kernels.manager_state import BAD_LENGTHS, OUT_OF_PAGES, TABLE_FULL, ManagerState


def admit(state: ManagerState, plan: Tensor) -> None:
    """Lay the conservative allocation of every head into table 0 from the left.

    ``plan`` int32 [3 n + 1]: slots; pages that the requests before take; pages of one head; pages of all.
    """
    slots, _, held = plan[:-1].long().view(3, -1)
    pages = _take(state, int(plan[-1]))
    if pages is None:
        return
    taken = _columns(state) < held[:, None, None, None]
    rows = state.tables[0, slots]
    rows[taken.expand_as(rows)] = pages
    state.tables[0, slots] = rows
    state.page_counts[slots, ..., 0] = held.to(torch.int32)[:, None, None]


def compact(state: ManagerState, slots: Tensor, planned: Tensor) -> None:
    """Pages of ``slots`` int32 [n] to the ends of their tiers' tables, what is left over back to the list.

    ``planned`` int32 [n, layers, kv_heads, tiers] tokens. Of a head's pages, as they were allocated, tier 0 keeps
    those at the left, tier 1 those at the right, its page 0 the last of all; of what lies between, tiers 2 and 3
    likewise; the middle goes back, left to right.
    """
    slots, entry = slots.long(), _columns(state)
    allocated = state.tables[0, slots]
    high = state.page_counts[slots, ..., :1].long()
    capacity = state.tier_tokens.long()
    needed = (planned.long() + capacity - 1).div(capacity, rounding_mode="floor")
    if bool(((planned < 0) | (planned > high * capacity)).any() | (needed.sum(dim=-1, keepdim=True) > high).any()):
        state.status.bitwise_or_(BAD_LENGTHS)
        return
    low = torch.zeros_like(high)
    for table in range(state.tables.shape[0]):
        left = needed[..., 2 * table, None]
        right = needed[..., 2 * table + 1, None] if 2 * table + 1 < state.tiers else torch.zeros_like(left)
        at_left, at_right = entry < left, entry >= state.entries - right
        source = torch.where(at_left, low + entry, torch.where(at_right, high - state.entries + entry, 0))
        state.tables[table, slots] = allocated.gather(-1, source).masked_fill(~(at_left | at_right), -1)
        low, high = low + left, high - right
    _recycle(state, allocated[(entry >= low) & (entry < high)])
    state.lengths[slots] = planned
    state.page_counts[slots] = needed.to(torch.int32)
    state.ready[slots] = 1


def reserve_step(state: ManagerState, active: Tensor) -> None:
    """A page for every tier whose last page is full, in the ready requests of ``active`` uint8 [max_requests]."""
    on = ((active != 0) & (state.ready != 0))[:, None, None, None]
    need = on & (state.lengths >= state.page_counts * state.tier_tokens)
    after = torch.nn.functional.pad(state.page_counts + need, (0, state.tiers % 2))
    crowded = after.unflatten(-1, (-1, 2)).sum(dim=-1) > state.entries
    full = bool((need & crowded.repeat_interleave(2, dim=-1)[..., : state.tiers]).any())
    index = need.nonzero()  # in the order request, layer, head, tier
    enough = len(index) <= int(state.ring[2])
    if full or not enough:
        state.status.bitwise_or_((TABLE_FULL if full else 0) | (0 if enough else OUT_OF_PAGES))
        return
    request, layer, head, tier = index.unbind(dim=1)
    held = state.page_counts[need].long()
    position = torch.where(tier % 2 == 0, held, state.entries - 1 - held)
    state.tables[tier // 2, request, layer, head, position] = _take(state, len(index))
    state.page_counts.add_(need)


def release(state: ManagerState, slots: Tensor) -> None:
    """All pages of ``slots`` int32 [n] back to the list, head by head and tier by tier; their tables emptied."""
    slots, entry = slots.long(), _columns(state)
    rows = [state.tables[tier // 2, slots] for tier in range(state.tiers)]
    by_tier = torch.stack([row.flip(-1) if tier % 2 else row for tier, row in enumerate(rows)], dim=-2)
    _recycle(state, by_tier[entry < state.page_counts[slots][..., None]])
    state.tables[:, slots] = -1
    state.lengths[slots] = 0
    state.page_counts[slots] = 0
    state.ready[slots] = 0


def _columns(state: ManagerState) -> Tensor:
    return torch.arange(state.entries, device=state.tables.device)


def _take(state: ManagerState, count: int) -> Tensor | None:
    """The next ``count`` page ids of the list; None and a mark in ``status`` where it has fewer."""
    if count > int(state.ring[2]):
        state.status.bitwise_or_(OUT_OF_PAGES)
        return None
    index = (state.ring[0] + torch.arange(count, device=state.free.device)) % state.pages
    state.ring[0] = (state.ring[0] + count) % state.pages
    state.ring[2] -= count
    return state.free[index]


def _recycle(state: ManagerState, pages: Tensor) -> None:
    index = (state.ring[1] + torch.arange(len(pages), device=state.free.device)) % state.pages
    state.free[index] = pages
    state.ring[1] = (state.ring[1] + len(pages)) % state.pages
    state.ring[2] += len(pages)
