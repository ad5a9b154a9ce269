"""The manager on a real GPU: captured in a CUDA graph, never waiting for the host, at the size of the paper's."""

import pytest
import torch
from memory_helpers import assert_same, assert_sound, everything, make, random_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def grow(memory, generator):
    """One token for a random tier of each head."""
    tier = torch.randint(0, memory.lengths.shape[-1], memory.lengths.shape[:-1], generator=generator)
    one = torch.nn.functional.one_hot(tier, memory.lengths.shape[-1]).to(torch.int32)
    return one.to(memory.device)


@pytest.fixture
def memories():
    """128 requests, 32 layers, 8 heads, 2 tiers: through Triton and through torch."""
    sizes = {"pages": 1_500_000, "layers": 32, "kv_heads": 8, "max_requests": 128, "max_tokens": 64, "watermark": 0}
    made = [make(2, device="cuda", kernels=kernels, pool=False, **sizes) for kernels in ("triton", "torch")]
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(128, generator=generator).tolist()[:101]
    tokens = torch.randint(1, 40, (101,), generator=generator).tolist()
    planned = random_plan(made[0], tokens, generator)
    for memory in made:
        memory.admit(slots, tokens)
        memory.compact(slots, planned)
    return made, slots


def test_the_published_size_equals_the_twin(memories):
    made, slots = memories
    generator = torch.Generator().manual_seed(1)
    active = torch.ones(128, dtype=torch.bool, device="cuda")
    for _ in range(5):
        grown = grow(made[0], generator)
        for memory in made:
            memory.reserve_step(active)
            memory.lengths.add_(grown * memory.state.ready[:, None, None, None])
        assert_same(everything(made[0])[0], everything(made[1])[0])
    for memory in made:
        memory.release(slots[::2])
    assert_same(everything(made[0])[0], everything(made[1])[0])
    assert_sound(made[0])


def test_a_replayed_step_equals_the_twin_and_never_waits(memories):
    (memory, twin), _ = memories
    generator = torch.Generator().manual_seed(2)
    active = torch.ones(128, dtype=torch.uint8, device="cuda")
    for one in (memory, twin):
        one.reserve_step(active)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = everything(memory)
    with torch.cuda.graph(graph):
        memory.reserve_step(active)
    assert_same(before[0], everything(memory)[0])
    assert before[1] == everything(memory)[1]  # the host counts steps, not captures
    for _ in range(6):
        # Only those that the step before had a page for.
        grown = grow(memory, generator) * (memory.state.ready * active)[:, None, None, None]
        for one in (memory, twin):
            one.lengths.add_(grown)
        active.copy_((torch.rand(128, generator=generator) < 0.8).to(torch.uint8))
        assert memory.can_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            memory.count_steps()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        twin.reserve_step(active)
        assert_same(everything(memory)[0], everything(twin)[0])
    assert_sound(memory)


def test_an_eager_step_and_a_prompt_never_wait(memories):
    (memory, _), slots = memories
    lengths = torch.ones(1, *memory.lengths.shape[1:], dtype=torch.int32, device="cuda")
    active = torch.ones(128, dtype=torch.uint8, device="cuda")
    empty = next(slot for slot in range(128) if slot not in slots)

    def work():
        memory.admit([empty], [9])
        memory.compact([empty], lengths, validate=False)
        memory.reserve_step(active)
        memory.release([empty])

    work()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_sound(memory)
