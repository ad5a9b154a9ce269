"""Torch twins of the kernels that put tokens into pages; same arguments, same bytes (DiffKV section 5)."""

import torch
from torch import Tensor

from diffkv_repro.cache.store import DROPPED
from diffkv_repro.core.vectors import VectorCodec
from diffkv_repro.diffkv.paged_view import KeyBias, PagedRule, PagedView


def partition(tiers: Tensor, n_tiers: int) -> tuple[Tensor, Tensor]:
    """Slots int32 of tokens within their tiers, in order, and how many each tier has, int32 [requests, heads, tiers].

    ``tiers`` int8 [requests, kv_heads, tokens]; dropped tokens have slot -1.
    """
    slots = torch.full(tiers.shape, -1, dtype=torch.int32, device=tiers.device)
    counts = torch.empty(*tiers.shape[:2], n_tiers, dtype=torch.int32, device=tiers.device)
    for tier in range(n_tiers):
        own = tiers == tier
        slots = torch.where(own, (own.cumsum(dim=-1) - 1).to(torch.int32), slots)
        counts[..., tier] = own.sum(dim=-1)
    return slots, counts


def classify(sums: Tensor, lengths: Tensor, rule: PagedRule, *, layer: int) -> Tensor:
    """Tiers int8 of prompt tokens from the scores they received; ``PolicyRule.prompt`` without left padding.

    ``sums`` float32 [requests, kv_heads, tokens]; ``lengths`` int32 [requests] of the prompts, past which there are no
    tokens. Means are compared with alpha over the length or over the position, counted from 1 (section 4); the last
    ``window`` tokens stay in the first tier.
    """
    column = torch.arange(sums.shape[2], device=sums.device)
    length = lengths.long()[:, None]
    first = column + (0 if rule.own_score else 1)
    if rule.observed:
        first = torch.maximum(first, length - rule.observed)
    significance = sums / (length - first).clamp_min(1)[:, None]
    divisor = (column + 1 if rule.prompt_by_position else length).expand(len(length), -1)[:, None]
    tier = tiers_of(significance, divisor, rule.alphas[layer, :, :, None])
    tier = tier.masked_fill((column >= length - rule.window)[:, None], 0)
    return tier.masked_fill((column >= length)[:, None], DROPPED)


def tiers_of(significance: Tensor, divisor: Tensor, alphas: Tensor) -> Tensor:
    """Tier int8 of each significance against ``alphas`` [tiers, ...] over ``divisor``: ``PolicyRule.classify``."""
    tier = torch.zeros(significance.shape, dtype=torch.int8, device=significance.device)
    for alpha in alphas[:-1]:
        tier += significance <= alpha / divisor
    return tier.masked_fill(significance < alphas[-1] / divisor, DROPPED)


def pack(
    view: PagedView, keys: Tensor, values: Tensor, tiers: Tensor, slots: Tensor, scores: Tensor,
    requests: Tensor, *, layer: int, positions: Tensor | None = None, bias: KeyBias | None = None,
) -> None:  # fmt: skip
    """Quantise prompt tokens and write them into the pages of their tiers; lengths are the caller's.

    ``keys``, ``values`` [requests, kv_heads, tokens, head_dim] in FP16, BF16 or FP32; ``tiers`` int8, ``slots`` int32
    and ``scores`` float32 [requests, kv_heads, tokens]; ``requests`` int32 rows of the tables; ``positions`` int32
    [requests, tokens], 0 on by default. With ``bias`` keys are stored without it. Tokens outside all tiers are left
    out. Raises ValueError for values beyond FP16.
    """
    if positions is None:
        positions = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device).expand(len(keys), -1)
    if bias is not None:
        keys = (keys.float() - bias.rotated(layer, positions).transpose(0, 1)).to(keys.dtype)
    for tier in range(view.tiers):
        row, head, token = ((tiers == tier) & (requests >= 0)[:, None, None]).nonzero(as_tuple=True)
        write_rows(
            view, tier, requests[row].long(), layer, head, slots[row, head, token].long(), keys[row, head, token],
            values[row, head, token], scores[row, head, token], positions[row, token],
        )  # fmt: skip


def write_rows(
    view: PagedView, tier: int, request: Tensor, layer: int, head: Tensor, slot: Tensor,
    key: Tensor, value: Tensor, score: Tensor, position: Tensor,
) -> None:  # fmt: skip
    """Quantise ``key``, ``value`` [n, head_dim] into slots [n] of a tier."""
    if not len(slot):
        return
    layout = view.layouts[tier]
    page = view.pages(tier, request, layer, head, slot // layout.tokens)[:, None]
    within = slot % layout.tokens
    units, words = view.pool.view(torch.int16), view.pool.view(torch.int32)
    key_codec, value_codec = codecs(view, tier)
    key_index, key_params, value_index, value_params, score_index, position_index = places(view, tier, within)
    for codec, rows, at, params_at in (
        (key_codec, key, key_index, key_params),
        (value_codec, value, value_index, value_params),
    ):
        codes, params = codec.encode(rows if codec.bits == 16 else rows.float())
        units[page, at] = codes.contiguous().view(torch.int16)
        if codec.params:
            pairs = torch.stack(params.chunk(2, dim=-1), dim=-1).flatten(-2)
            units[page, params_at] = pairs.contiguous().view(torch.int16)
    words[page[:, 0], score_index] = score.float().contiguous().view(torch.int32)
    words[page[:, 0], position_index] = position.to(torch.int32)


def read_rows(
    view: PagedView, tier: int, request: Tensor | int, layer: int, head: Tensor | int, slot: Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys and values [n, head_dim] in ``dtype``, scores float32 [n] and positions int32 [n] of slots of a tier."""
    layout = view.layouts[tier]
    page = view.pages(tier, request, layer, head, slot // layout.tokens)[:, None]
    units, words = view.pool.view(torch.int16), view.pool.view(torch.int32)
    key_index, key_params, value_index, value_params, score_index, position_index = places(
        view, tier, slot % layout.tokens
    )
    rows = []
    for codec, at, params_at in zip(
        codecs(view, tier), (key_index, value_index), (key_params, value_params), strict=True
    ):
        codes, params = units[page, at].view(torch.uint8), units[page, params_at].view(torch.float16)
        apart = params.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rows.append(codec.decode(codes, apart, dtype))
    return *rows, words[page[:, 0], score_index].view(torch.float32), words[page[:, 0], position_index]


def codecs(view: PagedView, tier: int) -> tuple[VectorCodec, VectorCodec]:
    """How keys and values of a tier are stored."""
    layout = view.layouts[tier]
    own = layout.precision
    return (
        VectorCodec(layout.head_dim, own.key_bits, own.key_groups),
        VectorCodec(layout.head_dim, own.value_bits, own.value_groups),
    )


def places(view: PagedView, tier: int, slot: Tensor) -> tuple[Tensor, ...]:
    """Where slots [n] of a page lie: key codes, key scales, value codes, value scales in 16-bit units [n, ...]; score
    and position in 32-bit words [n]."""
    layout = view.layouts[tier]
    key, key_scales, value, value_scales, scores, positions = layout.offsets
    key_units, value_units = layout.key_row_bytes // 2, layout.value_row_bytes // 2

    def span(count: int) -> Tensor:
        return torch.arange(count, device=slot.device)

    token = slot[:, None]
    return (
        key // 2 + token * key_units + span(key_units),
        key_scales // 2 + token * 2 * layout.key_groups + span(2 * layout.key_groups),
        value // 2 + (token // 2 * value_units + span(value_units)) * 2 + token % 2,
        value_scales // 2 + token * 2 * layout.value_groups + span(2 * layout.value_groups),
        scores // 4 + slot,
        positions // 4 + slot,
    )
