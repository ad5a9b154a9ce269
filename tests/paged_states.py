"""Caches in the midst of generation, for the tests of what a step does: on pages, and on dense tensors by the rules."""

import dataclasses
from types import SimpleNamespace

import torch
from cache_helpers import place_of
from paged_helpers import empty_view, filled_view, mixed_tiers

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Step
from diffkv_repro.diffkv import CompressionPolicy, reference, reference_attention, reference_step
from diffkv_repro.diffkv.paged_view import PagedRule

CPU = torch.device("cpu")

POLICIES = {
    "paper": CompressionPolicy.paper(alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step"),
    "by position": CompressionPolicy.paper(
        alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step", prompt_divisor="position",
        decode_divisor="position",
    ),
    "released": CompressionPolicy.released(alpha_high=1.5, alpha_low=0.8, window=5),
    "last queries": CompressionPolicy.paper(
        alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step", significance=Significance("last", 10)
    ),
    "three tiers": CompressionPolicy(("K8V4", "K4V2", "K2V2"), (1.5, 1.0, 0.5), window=5, group_max="each-step"),
    "FP16": CompressionPolicy(("K16V16", "K8V4"), (1.5, 0.5), window=5, group_max="each-step"),
}  # fmt: skip

TWINS = SimpleNamespace(
    classify_and_partition=lambda sums, lengths, rule, *, layer: (
        tiers := reference.classify(sums, lengths, rule, layer=layer),
        *reference.partition(tiers, rule.alphas.shape[1]),
    ),
    pack=reference.pack,
    significance=reference_attention.significance,
    decide=reference_step.decide,
    append=reference_step.append,
    decode_attention=reference_attention.decode_attention,
)


def generate(operations, policy, call, prompt, *, place, bias=None, layer=1):
    """Compress the first ``prompt`` tokens of a call and take in the others one by one.

    Yields before the first step and after each the view, the rows of the tables and the output.
    """
    requests, kv_heads, tokens, head_dim = call.key.shape
    rule = PagedRule.of([policy.rule(place)] * (layer + 1), kv_heads)
    rule = dataclasses.replace(rule, alphas=rule.alphas.to(call.key.device))
    view = empty_view(
        " ".join(map(str, policy.tiers)), head_dim=head_dim, requests=requests, kv_heads=kv_heads, layers=layer + 1,
        entries=2 * (-(-tokens // 7) + 2), device=call.key.device,
    )  # fmt: skip
    rows = torch.arange(requests - 1, -1, -1, dtype=torch.int32, device=call.key.device)
    lengths = torch.full((requests,), prompt, dtype=torch.int32, device=call.key.device)
    query, key, value = (tensor[:, :, :prompt] for tensor in (call.query, call.key, call.value))
    sums = operations.significance(query, key, policy.significance, scale=call.scale, lengths=lengths)
    tiers, slots, counts = operations.classify_and_partition(sums, lengths, rule, layer=layer)
    view.lengths[rows.long(), layer] = counts
    operations.pack(view, key, value, tiers, slots, sums, rows, layer=layer, bias=bias)
    yield view, rows, None
    for at in range(prompt, tokens):
        columns = torch.full_like(lengths, at)
        query, key, value = (tensor[:, :, at] for tensor in (call.query, call.key, call.value))
        plan = operations.decide(view, rows, columns, lengths, rule, layer=layer)
        operations.append(view, key, value, plan, rows, columns, layer=layer, bias=bias)
        newest = None if rule.own_score else plan[..., 0].contiguous()
        output = operations.decode_attention(
            view, query, layer=layer, requests=rows, scale=call.scale, newest=newest, bias=bias
        )
        yield view, rows, output


def stored(view, rows, columns, layer=1):
    """Tier int8 (-1: dropped) and score of every position of a cache, [requests, kv_heads, columns]."""
    tier = torch.full((len(rows), view.kv_heads, columns), -1, dtype=torch.int8)
    score = torch.zeros(tier.shape)
    for row, request in enumerate(rows.tolist()):
        for head in range(view.kv_heads):
            for index, count in enumerate(view.lengths[request, layer, head].tolist()):
                slot = torch.arange(count, device=view.pool.device)
                *_, scores, positions = reference.read_rows(view, index, request, layer, head, slot)
                at = positions.long().cpu()
                assert bool((tier[row, head, at] == -1).all()), "a position is stored twice"
                tier[row, head, at] = index
                score[row, head, at] = scores.cpu()
    return tier, score


def random_state(policy, columns, seed, device=CPU):
    """A cache after some generation: any tiers before the window, first tier within, scores with ties."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(4, 2, columns, 16, generator=generator) for _ in range(2))
    tier = mixed_tiers(4, 2, columns, len(policy.tiers), seed=seed, device=CPU)
    tier[..., max(columns - policy.window, 0) :] = 0
    view, rows, _ = filled_view(
        key.to(device), value.to(device), tier.to(device), " ".join(map(str, policy.tiers)), seed=seed
    )
    prompt = int(torch.randint(0, columns + 1, (1,), generator=generator))
    counts = policy.significance.counts(columns, prompt, CPU)
    means = torch.randint(0, 12, tier.shape, generator=generator) / 4 / columns
    scores = (means * counts).float()
    _rescore(view, rows, tier, scores)
    return view, rows, tier, scores, prompt


def _rescore(view, rows, tier, scores):
    words = view.pool.view(torch.float32)
    for row, request in enumerate(rows.tolist()):
        for head in range(view.kv_heads):
            for index, layout in enumerate(view.layouts):
                own = scores[row, head, tier[row, head] == index].to(view.pool.device)
                slot = torch.arange(len(own), device=view.pool.device)
                page = view.pages(index, request, 1, head, slot // layout.tokens)
                *_, at, _ = reference.places(view, index, slot % layout.tokens)
                words[page, at] = own


def check_decision(operations, name, columns, seed, device=CPU):
    """A step of the rule on dense tensors, and the same on pages."""
    policy = POLICIES[name]
    view, rows, tier, scores, prompt = random_state(policy, columns, seed, device)
    rule = policy.rule(place_of(head_dim=16))
    step = Step(columns, prompt, tier.clone(), scores[:, :, None], torch.zeros(4, dtype=torch.long))
    expected = tier.clone()
    for move in rule.step(step):
        row, head = move.where.nonzero(as_tuple=True)
        expected[row, head, move.column[row, head]] = move.tier[row, head].to(torch.int8)
    numbers = (torch.full((4,), number, dtype=torch.int32, device=device) for number in (columns, prompt))
    columns_tensor, prompts = numbers
    paged = PagedRule.of([rule] * 2, 2)
    paged = dataclasses.replace(paged, alphas=paged.alphas.to(device))
    plan = operations.decide(view, rows, columns_tensor, prompts, paged, layer=1)
    new = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(seed)).to(device)
    operations.append(view, new, new, plan, rows, columns_tensor, layer=1)
    found, found_scores = stored(view, rows, columns + 1)
    assert torch.equal(found[..., :columns], expected)
    assert bool((found[..., columns] == 0).all())
    kept = expected != DROPPED
    torch.testing.assert_close(found_scores[..., :columns][kept], scores[kept], rtol=0, atol=0)
    assert bool((found_scores[..., columns] == 0).all())
