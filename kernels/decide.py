"""What a generation step does to stored tokens: Algorithm 1 of DiffKV, and the rule of its released code.

Driven by what lies on the device alone, so that a captured graph goes on deciding; one launch serves all layers.
"""

import torch
import triton
import triton.language as tl
from diffkv_repro.kernels.pages import FIELDS, POSITIONS, SCORES, TOKENS, geometry, page_bytes_at, pool_views
from torch import Tensor

PLAN_FIELDS = 8
_LATEST = tl.constexpr(2**31 - 1)
_INF = tl.constexpr(float("inf"))


@triton.jit
def scan_tier(
    words, table, table_stride, entries, length, columns, prompt, observed, limit, column, GEOMETRY: tl.constexpr,
    TIER: tl.constexpr, PAGE_BYTES: tl.constexpr, OWN_SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Least mean score before position ``limit``, its slot (-1: none; the earliest position on ties), and slot (-1:
    none) and mean of the token at position ``column``."""
    per_page: tl.constexpr = GEOMETRY[TIER * FIELDS + TOKENS]
    scores: tl.constexpr = GEOMETRY[TIER * FIELDS + SCORES]
    positions: tl.constexpr = GEOMETRY[TIER * FIELDS + POSITIONS]
    best = tl.full((BLOCK,), _INF, tl.float32)
    best_position = tl.full((BLOCK,), _LATEST, tl.int32)
    best_slot = tl.full((BLOCK,), -1, tl.int32)
    its_slot = tl.full((BLOCK,), -1, tl.int32)
    its_mean = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < length
        page = page_bytes_at(table, table_stride, entries, slot // per_page, inside, TIER, PAGE_BYTES)
        at = words + page // 4 + slot % per_page
        score = tl.load(at + scores // 4, mask=inside, other=0).to(tl.float32, bitcast=True)
        position = tl.load(at + positions // 4, mask=inside, other=0)
        first = position if OWN_SCORE else position + 1
        first = tl.where(observed > 0, tl.maximum(first, prompt - observed), first)
        mean = tl.div_rn(score, tl.maximum(columns - first, 1).to(tl.float32))
        better = (mean < best) | ((mean == best) & (position < best_position))
        better = better & inside & (position < limit)
        best = tl.where(better, mean, best)
        best_position = tl.where(better, position, best_position)
        best_slot = tl.where(better, slot, best_slot)
        own = inside & (position == column)
        its_slot = tl.where(own, slot, its_slot)
        its_mean = tl.where(own, mean, its_mean)
    least = tl.min(best, axis=0)
    earliest = tl.min(tl.where(best == least, best_position, _LATEST), axis=0)
    victim = tl.max(tl.where((best == least) & (best_position == earliest), best_slot, -1), axis=0)
    return least, victim, tl.max(its_slot, axis=0), tl.sum(its_mean, axis=0)


@triton.jit
def tier_of(mean, alphas, kv_heads, divisor, TIERS: tl.constexpr):
    """The tier that a mean score belongs to, -1 for none."""
    tier = tl.full((), 0, tl.int32)
    for t in tl.static_range(TIERS):
        threshold = tl.div_rn(tl.load(alphas + t * kv_heads), divisor)
        if t < TIERS - 1:
            tier += (mean <= threshold).to(tl.int32)
        else:
            tier = tl.where(mean < threshold, -1, tier)
    return tier


@triton.jit
def decide_kernel(
    words, tables, lengths, requests, columns, prompts, alphas, plans,
    table_stride, table_request, table_layer, table_head, length_request, length_layer, length_head, entries,
    rows, kv_heads, first_layer, window, observed,
    GEOMETRY: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, OWN_SCORE: tl.constexpr,
    BY_POSITION: tl.constexpr, ALGORITHM_1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, row, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer = (first_layer + index).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    none = tl.full((), -1, tl.int32)
    new, source, source_slot, target, target_slot = none, none, none, none, none
    leaver, its_tier, its_slot = none, none, none
    if request >= 0:
        table = tables + request * table_request + layer * table_layer + head.to(tl.int64) * table_head
        length = lengths + request * length_request + layer * length_layer + head * length_head
        alpha = alphas + layer * TIERS * kv_heads + head
        seen, prompt = tl.load(columns + row).to(tl.int32), tl.load(prompts + row).to(tl.int32)
        divisor = tl.maximum(seen if BY_POSITION else seen + 1, 1).to(tl.float32)
        column = seen - window
        tokens = tl.load(length)
        new = tokens
        limit = column if ALGORITHM_1 else column + 1
        if column >= 0:
            least, victim, candidate, mean = scan_tier(
                words, table, table_stride, entries, tokens, seen, prompt, observed, limit, column, GEOMETRY, 0,
                PAGE_BYTES, OWN_SCORE, BLOCK,
            )  # fmt: skip
            if ALGORITHM_1:
                if candidate >= 0:
                    tier = tier_of(mean, alpha, kv_heads, divisor, TIERS)
                    for t in tl.static_range(1, TIERS):
                        if tier == t:
                            least, victim, _, _ = scan_tier(
                                words, table, table_stride, entries, tl.load(length + t), seen, prompt, observed,
                                limit, column, GEOMETRY, t, PAGE_BYTES, OWN_SCORE, BLOCK,
                            )  # fmt: skip
                    fate = tl.where(victim >= 0, tier_of(least, alpha, kv_heads, divisor, TIERS), tier)
                    leaves = (tier >= 0) & ((fate > tier) | (fate < 0))  # a victim is never promoted
                    moves = leaves & (fate >= 0)
                    source, source_slot = tl.where(leaves, tier, none), tl.where(leaves, victim, none)
                    end = tl.load(length + tl.maximum(fate, 0))
                    target, target_slot = tl.where(moves, fate, none), tl.where(moves, end, none)
                    room = tl.where(leaves, victim, tl.load(length + tl.maximum(tier, 0)))
                    new = tl.where(tier == 0, room, candidate)
                    lower = tier > 0
                    leaver, its_tier = tl.where(lower, candidate, none), tl.where(lower, tier, none)
                    its_slot = tl.where(lower, room, none)
            else:
                low_tokens = tl.load(length + 1)
                least_low, low, _, _ = scan_tier(
                    words, table, table_stride, entries, low_tokens, seen, prompt, observed, _LATEST, column, GEOMETRY,
                    1, PAGE_BYTES, OWN_SCORE, BLOCK,
                )  # fmt: skip
                high_threshold = tl.div_rn(tl.load(alpha), divisor)
                low_threshold = tl.div_rn(tl.load(alpha + kv_heads), divisor)
                prune = (victim >= 0) & (least < low_threshold) & (least < least_low)
                demote = (victim >= 0) & (prune == 0) & (least < high_threshold)
                evict = demote & (low >= 0) & (least_low < low_threshold)
                new = tl.where(prune | demote, victim, tokens)
                source, source_slot = tl.where(prune, 0, none), tl.where(prune, victim, none)
                leaver, its_tier = tl.where(demote, victim, none), tl.where(demote, 1, none)
                its_slot = tl.where(demote, tl.where(evict, low, low_tokens), none)
    plan = plans + ((index * rows + row).to(tl.int64) * kv_heads + head) * 8
    tl.store(plan, new)
    tl.store(plan + 1, source)
    tl.store(plan + 2, source_slot)
    tl.store(plan + 3, target)
    tl.store(plan + 4, target_slot)
    tl.store(plan + 5, leaver)
    tl.store(plan + 6, its_tier)
    tl.store(plan + 7, its_slot)


def decide_triton(
    view, requests: Tensor, columns: Tensor, prompts: Tensor, rule, *, layer: int | None = None,
    plan: Tensor | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Kernel of ``diffkv.reference_step.decide``: one launch, of all layers for ``layer`` None; into ``plan`` if given.

    ``block`` tokens are looked at together.
    """
    layers = view.tables.shape[2] if layer is None else 1
    rows, kv_heads = len(requests), view.tables.shape[3]
    shape = (layers, rows, kv_heads, PLAN_FIELDS)
    plans = torch.empty(shape, dtype=torch.int32, device=view.pool.device) if plan is None else plan
    if rows:
        _, words = pool_views(view.pool)
        decide_kernel[(kv_heads, rows, layers)](
            words, view.tables, view.lengths, requests, columns, prompts, rule.alphas, plans, *view.tables.stride()[:4],
            *view.lengths.stride()[:3], view.tables.shape[-1], rows, kv_heads, layer or 0, rule.window, rule.observed,
            GEOMETRY=geometry(view.layouts), TIERS=len(view.layouts), PAGE_BYTES=view.pool.shape[1],
            OWN_SCORE=rule.own_score, BY_POSITION=rule.decode_by_position,
            ALGORITHM_1=rule.decode == "algorithm-1", BLOCK=block or 512,
        )  # fmt: skip
    return plans if layer is None else plans.view(shape[1:])
