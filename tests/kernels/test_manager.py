"""The manager's Triton kernels hand out the pages that the torch twins do, bit for bit."""

import pytest
import torch
from aot import CAPABILITIES, Job, compile_jobs
from diffkv_repro.kernels import manager
from diffkv_repro.kernels.manager_state import BLOCK
from memory_helpers import assert_same, assert_sound, everything, make, random_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pair(tiers, **sizes):
    return [make(tiers, device=DEVICE, kernels=kernels, **sizes) for kernels in ("triton", "torch")]


def assert_twins(memories):
    kernel, twin = (everything(memory) for memory in memories)
    assert_same(kernel[0], twin[0])
    assert kernel[1] == twin[1]


def walk(memories, generator, turns):
    """Random requests come, take steps and go, in both memories alike; how many pages the steps took."""
    slots = memories[0].max_requests
    prompts, longest, taken = {}, memories[0].max_tokens, 0
    for _ in range(turns):
        new = [slot for slot in torch.randperm(slots, generator=generator).tolist() if slot not in prompts]
        new = new[: int(torch.randint(0, slots + 1, (), generator=generator))]
        tokens = torch.randint(1, longest, (len(new),), generator=generator).tolist()
        while not memories[1].can_admit(tokens):
            new, tokens = new[1:], tokens[1:]
        planned = random_plan(memories[0], tokens, generator)
        active = (torch.rand(slots, generator=generator) < 0.8).to(DEVICE)
        for memory in memories:
            memory.can_admit(tokens)
            memory.synchronize_counts()
            memory.admit(new, tokens)
        assert_twins(memories)
        for memory in memories:
            memory.compact(new, planned, validate=False)
        assert_twins(memories)
        prompts |= dict(zip(new, tokens, strict=True))
        for _ in range(2):
            active[[slot for slot, count in prompts.items() if count >= longest]] = False
            grown = torch.rand(memories[0].lengths.shape, generator=generator).to(DEVICE)
            for memory in memories:
                before = int(memory.ring[2])
                memory.reserve_step(active)
                taken += before - int(memory.ring[2])
                # The attention kernel appends a token to one tier of each head.
                room = memory.lengths < memory.page_counts * memory.state.tier_tokens
                tier = grown.masked_fill(~room, -1).argmax(dim=-1, keepdim=True)
                one = torch.zeros_like(memory.lengths).scatter_(-1, tier, 1)
                memory.lengths.add_(one * room * active[:, None, None, None])
            assert_twins(memories)
            prompts = {slot: count + 1 for slot, count in prompts.items()}
        gone = [slot for slot in prompts if torch.rand((), generator=generator) < 0.5 or prompts[slot] >= longest]
        for memory in memories:
            memory.release(gone)
        assert_twins(memories)
        prompts = {slot: count for slot, count in prompts.items() if slot not in gone}
        for memory in memories:
            memory.status.zero_()  # a step for which the pages did not suffice is compared too
    return taken


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("requests", "layers", "kv_heads", "pages", "max_tokens"),
    [(1, 1, 1, 17, 16), (3, 2, 3, 130, 11), (7, 3, 1, 257, 33), (5, 4, 2, 1000, 64)],
)
def test_random_operations_leave_the_same_state(tiers, requests, layers, kv_heads, pages, max_tokens):
    memories = pair(
        tiers, pages=pages, layers=layers, kv_heads=kv_heads, max_requests=requests, max_tokens=max_tokens, watermark=0
    )
    assert walk(memories, torch.Generator().manual_seed(tiers), turns=4 if requests > 1 else 16) > 0
    assert_sound(memories[0])


def test_128_requests_over_several_blocks():
    """More heads than one program counts, a pool that wraps, and a step larger than a block."""
    memories = pair(2, pages=2900, layers=1, kv_heads=5, max_requests=128, max_tokens=20)
    assert memories[0].state.rows > BLOCK
    assert walk(memories, torch.Generator().manual_seed(0), turns=2) > 2 * BLOCK
    assert_sound(memories[0])


def test_refused_operations_leave_only_a_mark():
    memories = pair(2, pages=28, layers=1, kv_heads=3, max_requests=2, max_tokens=16, watermark=0)
    full = torch.tensor([[[[8, 0]] * 3]], dtype=torch.int32, device=DEVICE)
    active = torch.ones(2, dtype=torch.bool, device=DEVICE)
    for memory in memories:
        memory.admit([1], [8])
        memory.compact([1], torch.full_like(full, -3), validate=False)
        assert int(memory.status) == 4
        memory.status.zero_()
        memory.release([1])
        memory.admit([0], [8])
        memory.compact([0], full)
        memory.admit([1], [7])
        memory.compact([1], full - torch.tensor([1, 0], dtype=torch.int32, device=DEVICE))
        assert memory.synchronize_counts() == 4
        before = everything(memory)[0]
        assert not memory.can_step()
        memory.reserve_step(active)
        after = everything(memory)[0]
        assert int(after.pop("status")) == 1
        assert_same({name: value for name, value in before.items() if name != "status"}, after)
    assert_twins(memories)


def test_a_table_without_room_is_left_alone():
    memories = pair(2, pages=90, layers=1, kv_heads=1, max_requests=1, max_tokens=8, watermark=0)
    for memory in memories:
        memory.admit([0], [8])
        memory.compact([0], torch.tensor([[[[8, 0]]]], dtype=torch.int32, device=DEVICE))
        before = everything(memory)[0]
        memory.reserve_step(torch.ones(1, dtype=torch.uint8, device=DEVICE))
        after = everything(memory)[0]
        assert int(after.pop("status")) == 2
        assert_same({name: value for name, value in before.items() if name != "status"}, after)
    assert_twins(memories)


def jobs():
    """Every kernel, for two and for three tiers, with the arguments of the launches."""
    row = {"ENTRIES": 512}
    scan = {"SIZE": BLOCK, "SUMS": 128}
    numbers = {"n", "total", "per_request", "heads", "entries", "blocks", "rows", "pages"}
    for tiers in (2, 3):
        for kernel, constants in (
            (manager.count_step_kernel, {"SIZE": BLOCK}),
            (manager.take_step_kernel, scan),
            (manager.admit_kernel, row),
            (manager.advance_kernel, None),
            (manager.plan_compaction_kernel, {"SIZE": BLOCK}),
            (manager.compact_kernel, scan | row),
            (manager.plan_release_kernel, {"SIZE": BLOCK}),
            (manager.release_kernel, scan | row),
        ):
            constants = {} if constants is None else {"TIERS": tiers} | constants
            names = [name for name in kernel.arg_names if name not in constants]
            types = {
                name: "i32" if name in numbers else "*u8" if name in ("active", "ready") else "*i32" for name in names
            }
            yield Job.of(kernel, types, constants)


def test_kernels_compile_for_ampere_ada_and_hopper():
    wanted = list(jobs())
    sizes = compile_jobs(wanted)
    assert len(sizes) == len(wanted) * len(CAPABILITIES)
    assert min(sizes) > 0
