"""Launch the kernels of the memory manager; the same functions as their torch twins, the same page ids."""

import triton
from diffkv_repro.kernels import manager
from diffkv_repro.kernels.manager_state import BLOCK, ManagerState
from torch import Tensor


def admit(state: ManagerState, plan: Tensor) -> None:
    """Lay the conservative allocations of ``plan`` into table 0 (see ``admit_kernel``): two launches."""
    n = (plan.numel() - 1) // 3
    manager.admit_kernel[(n * state.heads,)](
        plan, state.ring, state.free, state.tables, state.page_counts, n, state.heads, state.entries, state.pages,
        TIERS=state.tiers, **_row(state),
    )  # fmt: skip
    manager.advance_kernel[(1,)](plan, state.ring, state.status, n, state.pages, num_warps=1)


def compact(state: ManagerState, slots: Tensor, planned: Tensor) -> None:
    """Give back what ``planned`` int32 [n, layers, kv_heads, tiers] leaves of ``slots`` int32 [n]: two launches."""
    total = slots.numel() * state.heads
    blocks = triton.cdiv(total, BLOCK)
    manager.plan_compaction_kernel[(blocks,)](
        slots, planned, state.page_counts, state.tier_tokens, state.ring, state.snapshot, state.offsets, state.sums,
        total, state.heads, blocks, TIERS=state.tiers, SIZE=BLOCK, num_warps=4,
    )  # fmt: skip
    manager.compact_kernel[(total,)](
        slots, planned, state.lengths, state.page_counts, state.ready, state.tier_tokens, state.ring, state.snapshot,
        state.offsets, state.sums, state.free, state.tables, state.status, state.heads, state.entries, blocks,
        state.rows, state.pages, TIERS=state.tiers, SIZE=BLOCK, SUMS=_sums(blocks), **_row(state),
    )  # fmt: skip


def reserve_step(state: ManagerState, active: Tensor) -> None:
    """A page for every full tier of the requests in ``active`` uint8 [max_requests]: two launches, no host."""
    total = state.lengths.numel()
    blocks = triton.cdiv(total, BLOCK)
    sizes = (total, total // active.numel(), state.entries, blocks)
    manager.count_step_kernel[(blocks,)](
        state.lengths, state.page_counts, active, state.ready, state.tier_tokens, state.ring, state.snapshot,
        state.sums, *sizes, TIERS=state.tiers, SIZE=BLOCK, num_warps=4,
    )  # fmt: skip
    manager.take_step_kernel[(blocks,)](
        state.lengths, state.page_counts, active, state.ready, state.tier_tokens, state.ring, state.snapshot,
        state.sums, state.free, state.tables, state.status, *sizes, state.rows, state.pages,
        TIERS=state.tiers, SIZE=BLOCK, SUMS=_sums(blocks), num_warps=4,
    )  # fmt: skip


def release(state: ManagerState, slots: Tensor) -> None:
    """All pages of ``slots`` int32 [n] back to the list: two launches."""
    total = slots.numel() * state.heads
    blocks = triton.cdiv(total, BLOCK)
    manager.plan_release_kernel[(blocks,)](
        slots, state.page_counts, state.ring, state.snapshot, state.offsets, state.sums, total, state.heads, blocks,
        TIERS=state.tiers, SIZE=BLOCK, num_warps=4,
    )  # fmt: skip
    manager.release_kernel[(total,)](
        slots, state.lengths, state.page_counts, state.ready, state.ring, state.snapshot, state.offsets, state.sums,
        state.free, state.tables, state.heads, state.entries, blocks, state.rows, state.pages,
        TIERS=state.tiers, SIZE=BLOCK, SUMS=_sums(blocks), **_row(state),
    )  # fmt: skip


def _sums(blocks: int) -> int:
    return triton.next_power_of_2(blocks)


def _row(state: ManagerState) -> dict[str, int]:
    """A program holds a whole row of a table in registers: some eight entries a thread."""
    entries = triton.next_power_of_2(state.entries)
    return {"ENTRIES": entries, "num_warps": min(8, max(1, entries // 256))}
