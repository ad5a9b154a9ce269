"""Memory manager and data kernels together: a generation on pages that come and go is that of the packed cache."""

import dataclasses

import pytest
import torch
from cache_helpers import cut, place_of, prompt_of, random_call, rows_of
from paged_helpers import DEVICE, assert_close, page_bytes_for
from paged_states import POLICIES, stored

from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.diffkv import paged_ops
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.paged_view import PagedRule, PagedView

PROMPT, TOKENS = 30, 38


@pytest.mark.parametrize("name", ["paper", "three tiers"])
def test_a_generation_on_managed_pages(name):
    policy, place = POLICIES[name], place_of(head_dim=16)
    call = random_call(tokens=TOKENS, head_dim=16, seed=4)
    layer = TieredLayer(place, policy.rule(place), storage="packed")
    layer.prefill(prompt_of(cut(call, 0, PROMPT)), rows_of(2, PROMPT))

    size = page_bytes_for(policy.tiers, 16)
    layouts = tuple(PageLayout(precision, 16, size) for precision in policy.tiers)
    memory = PagedMemory(
        layouts, pages=200, layers=1, kv_heads=2, max_requests=3, max_tokens=64, device=DEVICE, watermark=0.0
    )
    memory.pool.fill_(0xFF)
    view = PagedView(memory.pool, memory.tables, memory.lengths, memory.layouts)
    rule = PagedRule.of([policy.rule(place)], 2)
    rule = dataclasses.replace(rule, alphas=rule.alphas.to(DEVICE))
    slots, active = [2, 0], torch.tensor([1, 0, 1], dtype=torch.uint8, device=DEVICE)
    rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2,), PROMPT, dtype=torch.int32, device=DEVICE)
    query, key, value = (tensor.to(DEVICE) for tensor in (call.query, call.key, call.value))
    prompt = (query[:, :, :PROMPT], key[:, :, :PROMPT], value[:, :, :PROMPT])

    memory.admit(slots, [PROMPT, PROMPT])
    sums = paged_ops.significance(*prompt[:2], policy.significance, scale=call.scale, lengths=lengths)
    tiers, places, counts = paged_ops.classify_and_partition(sums, lengths, rule, layer=0)
    memory.compact(slots, counts[:, None].contiguous())
    paged_ops.pack(view, *prompt[1:], tiers, places, sums, rows, layer=0)
    for at in range(PROMPT, TOKENS):
        columns = torch.full_like(lengths, at)
        memory.reserve_step(active)
        plan = paged_ops.decide(view, rows, columns, lengths, rule)[0]
        paged_ops.append(view, key[:, :, at], value[:, :, at], plan, rows, columns, layer=0)
        output = paged_ops.decode_attention(
            view, query[:, :, at], layer=0, requests=rows, scale=call.scale, newest=plan[..., 0].contiguous()
        )
        expected = layer.decode(cut(call, at, at + 1), rows_of(2, at + 1))[:, :, 0]
        assert_close(f"output {at}", output, expected)
        assert torch.equal(stored(view, rows, at + 1, layer=0)[0], layer.store.tier)
