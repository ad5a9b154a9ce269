"""Small paged memories for the tests, and what must hold of any of them at any time."""

import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.oracle import OracleManager

TIERS = ("K8V4", "K4V2", "K2V2", "K2V1")
"""At head_dim 32 a page of 256 bytes holds a few tokens of each."""


def make(tiers=2, *, pages=64, layers=2, kv_heads=2, max_requests=3, max_tokens=16, **rest):
    layouts = [PageLayout(Precision.parse(name), 32, 256) for name in TIERS[:tiers]]
    return PagedMemory(
        layouts, pages=pages, layers=layers, kv_heads=kv_heads, max_requests=max_requests, max_tokens=max_tokens, **rest
    )


def oracle_of(memory):
    _, _, layers, kv_heads, entries = memory.tables.shape
    return OracleManager(
        [layout.tokens for layout in memory.layouts], pages=len(memory.free), layers=layers, kv_heads=kv_heads,
        entries=entries, spare=memory.spare,
    )  # fmt: skip


def free_pages(memory):
    """Page ids in the list, next to take first."""
    head, _, count = memory.ring.tolist()
    index = (head + torch.arange(count)) % len(memory.free)
    return memory.free.cpu()[index]


def random_plan(memory, tokens, generator):
    """Lengths int32 [n, layers, kv_heads, tiers] of prompts, at random: some heads keep all, some nothing."""
    layers, kv_heads, tiers = memory.lengths.shape[1:]
    shares = torch.rand(len(tokens), layers, kv_heads, tiers + 1, generator=generator) ** 3
    shares = shares / shares.sum(dim=-1, keepdim=True).clamp_min(1e-9)
    plan = (shares[..., :tiers] * torch.tensor(tokens)[:, None, None, None]).round()
    excess = (plan.sum(dim=-1) - torch.tensor(tokens)[:, None, None]).clamp_min(0)
    plan[..., 0] = (plan[..., 0] - excess).clamp_min(0)
    plan[plan.sum(dim=-1) > torch.tensor(tokens)[:, None, None]] = 0
    return plan.to(torch.int32).to(memory.device)


def everything(memory):
    """A copy of all that callers can see and of what the host remembers."""
    names = ("free", "ring", "status", "tables", "lengths", "page_counts")
    state = {name: getattr(memory, name).clone() for name in names} | {"ready": memory.state.ready.clone()}
    host = (dict(memory._prompts), set(memory._compacted), vars(memory._bound).copy())
    return state, repr(host)


def assert_same(left, right):
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def assert_sound(memory):
    """Every page once, in the list or in one table; tables filled from both ends and nowhere else; room for tokens."""
    tables, counts = memory.tables.cpu(), memory.page_counts.cpu().long()
    pages, entries, tiers = len(memory.free), tables.shape[-1], counts.shape[-1]
    held = tables[tables >= 0]
    listed = free_pages(memory)
    assert torch.equal(torch.cat([held, listed]).sort().values, torch.arange(pages, dtype=torch.int32))
    entry = torch.arange(entries)
    for table in range(tables.shape[0]):
        left = counts[..., 2 * table, None]
        right = counts[..., 2 * table + 1, None] if 2 * table + 1 < tiers else torch.zeros_like(left)
        assert bool((left + right <= entries).all())
        assert torch.equal(tables[table] >= 0, (entry < left) | (entry >= entries - right))
    room = counts * memory.state.tier_tokens.cpu()
    assert bool((memory.lengths.cpu() <= room).all())
    assert memory.free_bound <= len(listed)
    head, tail, count = memory.ring.tolist()
    assert (head + count) % pages == tail


def assert_matches(memory, oracle):
    """The same list, ends, tables and counts as the oracle's."""
    assert free_pages(memory).tolist() == oracle.queue
    assert memory.ring.tolist() == [oracle.taken % oracle.pages, oracle.recycled % oracle.pages, len(oracle.queue)]
    tables, counts, lengths = memory.tables.tolist(), memory.page_counts.tolist(), memory.lengths.tolist()
    for slot in range(memory.max_requests):
        for head in oracle.heads(slot):
            _, layer, kv_head = head
            for table, rows in enumerate(tables):
                assert rows[slot][layer][kv_head] == oracle.row(head, table)
            none = [0] * len(oracle.tokens_per_page)
            assert counts[slot][layer][kv_head] == list(map(len, oracle.held.get(head, [[] for _ in none])))
            assert lengths[slot][layer][kv_head] == oracle.tokens.get(head, none)
