"""Torch twins of the generation-phase kernels: what happens to stored tokens, and making it so (DiffKV Algorithm 1)."""

import torch
from torch import Tensor

from diffkv_repro.cache.store import DROPPED
from diffkv_repro.diffkv.paged_view import PLAN_FIELDS, KeyBias, PagedRule, PagedView
from diffkv_repro.diffkv.reference import places, read_rows, tiers_of, write_rows

_NOWHERE = (-1, -1)


def decide(
    view: PagedView, requests: Tensor, columns: Tensor, prompts: Tensor, rule: PagedRule, *, layer: int | None = None
) -> Tensor:
    """The plan of a step, int32 [requests, kv_heads, PLAN_FIELDS]; [layers, ...] of all layers for ``layer`` None.

    ``requests`` int32 rows of the tables, -1 for none; ``columns`` int32 tokens that each has seen, the one about to
    enter not among them; ``prompts`` int32 how many of them were its prompt. Scores are those up to the previous
    step. A step never shortens a tier: what leaves makes room for what enters.
    """
    layers = range(view.layers) if layer is None else (layer,)
    plans = torch.full((len(layers), len(requests), view.kv_heads, PLAN_FIELDS), -1, dtype=torch.int32)
    for index, own in enumerate(layers):
        for row, request in enumerate(requests.tolist()):
            for head in range(view.kv_heads if request >= 0 else 0):
                given = (int(columns[row]), int(prompts[row]), rule)
                plan = _algorithm_1 if rule.decode == "algorithm-1" else _two_minimum
                fields = plan(_Head(view, request, own, head), *given)
                plans[index, row, head] = torch.tensor(fields, dtype=torch.int32)
    plans = plans.to(view.pool.device)
    return plans if layer is None else plans[0]


class _Head:
    """Scores and positions of one KV head, tier by tier."""

    def __init__(self, view: PagedView, request: int, layer: int, head: int) -> None:
        self.layer, self.head = layer, head
        self.lengths = view.lengths[request, layer, head].tolist()
        self._tokens = [_metadata(view, tier, request, layer, head, n) for tier, n in enumerate(self.lengths)]

    def means(self, tier: int, columns: int, prompt: int, rule: PagedRule) -> tuple[Tensor, Tensor]:
        """Significance float32 and positions of the tokens of a tier."""
        scores, positions = self._tokens[tier]
        first = positions.long() + (0 if rule.own_score else 1)
        if rule.observed:
            first = first.clamp_min(prompt - rule.observed)
        return scores / (columns - first).clamp_min(1), positions


def _algorithm_1(own: _Head, columns: int, prompt: int, rule: PagedRule) -> tuple[int, ...]:
    append = (own.lengths[0], -1, -1, *_NOWHERE, -1, *_NOWHERE)
    column = columns - rule.window
    if column < 0:
        return append
    alphas, divisor = _thresholds(own, columns, rule)
    means, positions = own.means(0, columns, prompt, rule)
    found = (positions == column).nonzero()
    if not len(found):
        return append  # dropped already
    candidate = int(found[0, 0])
    tier = int(tiers_of(means[candidate], divisor, alphas))
    if tier == DROPPED:
        return candidate, -1, -1, *_NOWHERE, -1, *_NOWHERE
    means, positions = own.means(tier, columns, prompt, rule)
    victim = _least(means, positions, positions < column)
    fate = tier
    if victim >= 0:
        fate = int(tiers_of(means[victim], divisor, alphas))
    leaves = fate > tier or fate == DROPPED  # a victim is never promoted
    target = (fate, own.lengths[fate]) if leaves and fate != DROPPED else _NOWHERE
    if not leaves:
        victim = -1
    source = (tier, victim) if leaves else _NOWHERE
    if tier == 0:
        return victim if leaves else own.lengths[0], *source, *target, -1, *_NOWHERE
    return candidate, *source, *target, candidate, tier, victim if leaves else own.lengths[tier]


def _two_minimum(own: _Head, columns: int, prompt: int, rule: PagedRule) -> tuple[int, ...]:
    append = (own.lengths[0], -1, -1, *_NOWHERE, -1, *_NOWHERE)
    if columns < rule.window:
        return append
    alphas, divisor = _thresholds(own, columns, rule)
    high_threshold, low_threshold = alphas / divisor
    means, positions = own.means(0, columns, prompt, rule)
    high = _least(means, positions, positions <= columns - rule.window)
    if high < 0:
        return append
    least_high = means[high]
    means, positions = own.means(1, columns, prompt, rule)
    low = _least(means, positions, positions >= 0)
    least_low = means[low] if low >= 0 else torch.tensor(torch.inf)
    if bool(least_high < low_threshold) and bool(least_high < least_low):
        return high, 0, high, *_NOWHERE, -1, *_NOWHERE
    if not bool(least_high < high_threshold):
        return append
    evict = low >= 0 and bool(least_low < low_threshold)
    return high, -1, -1, *_NOWHERE, high, 1, low if evict else own.lengths[1]


def _thresholds(own: _Head, columns: int, rule: PagedRule) -> tuple[Tensor, Tensor]:
    """Alphas [tiers] of the head and what they are divided by: N or N - 1."""
    divisor = max(columns + (0 if rule.decode_by_position else 1), 1)
    return rule.alphas[own.layer, :, own.head].cpu(), torch.tensor(divisor)


def _least(means: Tensor, positions: Tensor, among: Tensor) -> int:
    """Slot of the least of ``means`` where ``among``, the earliest position on ties; -1 for none. NaN is no number to
    compare."""
    among = among & ~means.isnan()
    if not bool(among.any()):
        return -1
    slots = among.nonzero()[:, 0]
    ties = slots[means[slots] == means[slots].min()]
    return int(ties[positions[ties].argmin()])


def _metadata(view: PagedView, tier: int, request: int, layer: int, head: int, count: int) -> tuple[Tensor, Tensor]:
    layout = view.layouts[tier]
    slot = torch.arange(count, device=view.pool.device)
    page = view.pages(tier, request, layer, head, slot // layout.tokens)
    *_, score_index, position_index = places(view, tier, slot % layout.tokens)
    words = view.pool.view(torch.int32)
    return words[page, score_index].view(torch.float32).cpu(), words[page, position_index].cpu()


def append(
    view: PagedView, key: Tensor, value: Tensor, plan: Tensor, requests: Tensor, columns: Tensor, *,
    layer: int, bias: KeyBias | None = None,
) -> None:  # fmt: skip
    """Carry out the ``plan`` [requests, kv_heads, PLAN_FIELDS] of a layer and write its new tokens; lengths grow.

    ``key``, ``value`` [requests, kv_heads, head_dim]; their positions are ``columns`` int32 [requests], their scores
    start at 0. What moves to another tier goes through its dequantised values, in the type of ``key``, and keeps its
    score and position. With ``bias`` keys are stored without it.
    """
    for row, request in enumerate(requests.tolist()):
        if request < 0:
            continue
        position = columns[row : row + 1]
        for head in range(view.kv_heads):
            new, from_tier, from_slot, to_tier, to_slot, candidate, its_tier, its_slot = plan[row, head].tolist()
            where = (request, layer, head)
            # In this order: the victim makes room for the candidate, which makes room for the new token.
            if to_tier >= 0:
                _move(view, where, from_tier, from_slot, to_tier, to_slot, key.dtype)
            if its_tier >= 0:
                _move(view, where, 0, candidate, its_tier, its_slot, key.dtype)
            if new >= 0:
                own = key[row, head]
                if bias is not None:
                    own = (own.float() - bias.rotated(layer, position)[head, 0]).to(own.dtype)
                _put(view, where, 0, new, own[None], value[row, head][None], torch.zeros(1), position)


def _move(
    view: PagedView, where: tuple[int, int, int], tier: int, slot: int, to: int, to_slot: int, dtype: torch.dtype
) -> None:
    rows = read_rows(view, tier, *where, torch.tensor([slot], device=view.pool.device), dtype)
    _put(view, where, to, to_slot, *rows)


def _put(
    view: PagedView, where: tuple[int, int, int], tier: int, slot: int, key: Tensor, value: Tensor, score: Tensor,
    position: Tensor,
) -> None:  # fmt: skip
    device = view.pool.device
    request, layer, head = where
    index = (torch.tensor([request], device=device), layer, torch.tensor([head], device=device))
    write_rows(view, tier, *index, torch.tensor([slot], device=device), key, value, score.to(device), position)
    if slot == int(view.lengths[(*where, tier)]):
        view.lengths[(*where, tier)] += 1
