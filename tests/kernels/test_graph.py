"""A decode step on a GPU: nothing of it waits for the host, and a captured graph goes on deciding as lengths grow."""

import dataclasses

import pytest
import torch
from cache_helpers import place_of
from paged_helpers import DEVICE, assert_close, moved
from paged_states import POLICIES, random_state, stored

from diffkv_repro.diffkv import paged_ops, reference_attention, reference_step
from diffkv_repro.diffkv.paged_view import PagedRule

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["paper", "released", "three tiers"])
def test_a_captured_step_goes_on_deciding(name):
    policy = POLICIES[name]
    view, rows, *_, prompt = random_state(policy, 40, 3, DEVICE)
    twin = moved(view, "cpu")
    rule = PagedRule.of([policy.rule(place_of())] * 2, 2)
    on_device = dataclasses.replace(rule, alphas=rule.alphas.to(DEVICE))
    columns, prompts = (torch.full((4,), number, dtype=torch.int32, device=DEVICE) for number in (40, prompt))
    query, key, value = (torch.randn(4, heads, 16, device=DEVICE).half() for heads in (6, 2, 2))
    out = torch.empty_like(query)

    def step(cache):
        plan = paged_ops.decide(cache, rows, columns, prompts, on_device)
        paged_ops.append(cache, key, value, plan[1], rows, columns, layer=1)
        newest = plan[1, ..., 0].contiguous()
        paged_ops.decode_attention(cache, query, layer=1, requests=rows, scale=0.25, newest=newest, out=out)
        columns.add_(1)

    step(moved(view, DEVICE))  # compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(moved_on_device := dataclasses.replace(view, pool=view.pool.clone(), lengths=view.lengths.clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    del moved_on_device
    columns.fill_(40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(view)
    for at in range(40, 48):
        graph.replay()
        cpu = (rows.cpu(), torch.full((4,), at, dtype=torch.int32), prompts.cpu())
        plan = reference_step.decide(twin, *cpu, rule, layer=1)
        reference_step.append(twin, key.cpu(), value.cpu(), plan, *cpu[:2], layer=1)
        expected = reference_attention.decode_attention(
            twin, query.cpu().double(), layer=1, requests=cpu[0], scale=0.25, newest=plan[..., 0]
        )
        assert_close(f"output {at}", out, expected)
        for seen, right in zip(stored(view, rows, at + 1), stored(twin, cpu[0], at + 1), strict=True):
            assert_close(f"state {at}", seen, right)
