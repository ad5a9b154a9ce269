"""Decode attention over unified pages in Triton: the portable path, for any shape (DiffKV section 5.3; kernels ours).

One program serves all query heads of a KV head, so that each code is read once. Codes are not converted to numbers: as
an FP16 bit pattern a code is the subnormal number code * 2**-24, which tensor cores multiply exactly. Scales come in
afterwards, by q.(s c + z) = s (q.c) + z sum(q) and sum p (s c + z) = sum (p s) c + sum p z. The sequence is split over
programs; a second launch merges their results and adds to the scores of tokens.
"""

import math

import torch
import triton
import triton.language as tl
from diffkv_repro.kernels.decode_merge import merge_kernel
from diffkv_repro.kernels.pages import (
    FIELDS,
    KEY_BITS,
    KEY_GROUPS,
    KEY_SCALES,
    POSITIONS,
    TOKENS,
    VALUE_BITS,
    VALUE_GROUPS,
    VALUE_SCALES,
    VALUES,
    geometry,
    locate,
    padded,
    page_bytes_at,
    pool_views,
    tiles_of,
)
from torch import Tensor

_INF = tl.constexpr(float("inf"))
_CODE = tl.constexpr(2.0**24)  # what a code's bit pattern lacks to be the code
_LOG2_E = 1.4426950408889634


@triton.jit
def scale_pair(word):
    """Scale and zero point float32 from the 32-bit word that holds both."""
    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_for(largest):
    """Powers of two, float32 [n]: one that brings ``largest`` >= 0 to between 2**14 and 2**15, and its inverse."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def attend_tile(
    units, words, table, table_stride, entries, tile, length, query, query_rest, query_scale, query_sum, along, across,
    angles, scale, top, weight, acc, logits, logit_row, logit_mask,
    GEOMETRY: tl.constexpr, TIER: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TWO_TERMS: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of ``BLOCK`` tokens of a tier: new ``top``, ``weight`` [heads], ``acc``
    [heads, WIDTH]; all logits are in base 2."""
    per_page: tl.constexpr = GEOMETRY[TIER * FIELDS + TOKENS]
    bits: tl.constexpr = GEOMETRY[TIER * FIELDS + KEY_BITS]
    groups: tl.constexpr = GEOMETRY[TIER * FIELDS + KEY_GROUPS]
    per_unit: tl.constexpr = 16 // bits
    count: tl.constexpr = HEAD_DIM // per_unit
    page, slot, valid = locate(tile * BLOCK + tl.arange(0, BLOCK), length, per_page)
    base = page_bytes_at(table, table_stride, entries, page, valid, TIER, PAGE_BYTES)
    channel = tl.arange(0, WIDTH)

    unit = tl.arange(0, WIDTH // per_unit)
    at = units + (base // 2)[:, None] + (slot * count)[:, None] + unit[None, :]
    raw = tl.load(at, mask=valid[:, None] & (unit < count)[None, :], other=0)
    if bits < 16:
        shift = (tl.arange(0, per_unit) * bits).to(tl.int16)
        raw = tl.reshape((raw[:, :, None] >> shift[None, None, :]) & (2**bits - 1), (BLOCK, WIDTH))
    keys = tl.trans(raw.to(tl.int16).to(tl.float16, bitcast=True))
    if bits == 16:
        logit = tl.dot(query, keys)
        if TWO_TERMS:
            logit += tl.dot(query_rest, keys)
        logit = logit * query_scale[:, None]
    else:
        logit = tl.zeros((query.shape[0], BLOCK), tl.float32)
        for g in tl.static_range(groups):
            part, rest, part_sum = query, query_rest, query_sum
            if groups > 1:
                own = (channel // (HEAD_DIM // groups) == g)[None, :]
                part = tl.where(own, query, 0.0).to(tl.float16)
                part_sum = tl.sum(part.to(tl.float32), axis=1)
                if TWO_TERMS:
                    rest = tl.where(own, query_rest, 0.0).to(tl.float16)
                    part_sum += tl.sum(rest.to(tl.float32), axis=1)
                part_sum *= query_scale
            product = tl.dot(part, keys)
            if TWO_TERMS:
                product += tl.dot(rest, keys)
            where = words + base // 4 + GEOMETRY[TIER * FIELDS + KEY_SCALES] // 4 + slot * groups + g
            step, zero = scale_pair(tl.load(where, mask=valid, other=0))
            logit += product * (query_scale * _CODE)[:, None] * step[None, :] + part_sum[:, None] * zero[None, :]
    if BIAS:
        half: tl.constexpr = HEAD_DIM // 2
        where = words + base // 4 + GEOMETRY[TIER * FIELDS + POSITIONS] // 4 + slot
        position = tl.load(where, mask=valid, other=0).to(tl.int64)
        angle = tl.arange(0, along.shape[1])
        where = angles + position[:, None] * HEAD_DIM + angle[None, :]
        inside = valid[:, None] & (angle < half)[None, :]
        cos, sin = tl.load(where, mask=inside, other=0.0), tl.load(where + half, mask=inside, other=0.0)
        logit += tl.dot(along, tl.trans(cos), input_precision="tf32x3")
        logit += tl.dot(across, tl.trans(sin), input_precision="tf32x3")
    logit = tl.where(valid[None, :], logit * scale, -_INF)
    if KEEP:
        tl.store(logits + logit_row[:, None] + tl.arange(0, BLOCK)[None, :], logit, mask=logit_mask[:, None])

    new_top = tl.maximum(top, tl.max(logit, axis=1))
    shown = tl.where(new_top == -_INF, 0.0, new_top)
    fade = tl.exp2(top - shown)
    p = tl.exp2(logit - shown[:, None])
    weight = weight * fade + tl.sum(p, axis=1)
    acc = acc * fade[:, None]

    value_bits: tl.constexpr = GEOMETRY[TIER * FIELDS + VALUE_BITS]
    value_groups: tl.constexpr = GEOMETRY[TIER * FIELDS + VALUE_GROUPS]
    value_per_unit: tl.constexpr = 16 // value_bits
    value_count: tl.constexpr = HEAD_DIM // value_per_unit
    pair_page, pair_slot, pair_valid = locate(tile * BLOCK + 2 * tl.arange(0, BLOCK // 2), length, per_page)
    pair_base = page_bytes_at(table, table_stride, entries, pair_page, pair_valid, TIER, PAGE_BYTES)
    value_unit = tl.arange(0, WIDTH // value_per_unit)
    at = words + (pair_base // 4 + GEOMETRY[TIER * FIELDS + VALUES] // 4 + pair_slot // 2 * value_count)[:, None]
    word = tl.load(at + value_unit[None, :], mask=pair_valid[:, None] & (value_unit < value_count)[None, :], other=0)
    lane = (16 * tl.arange(0, 2))[None, :, None, None] + (value_bits * tl.arange(0, value_per_unit))[
        None, None, None, :
    ]
    codes = tl.reshape((word[:, None, :, None] >> lane) & (2**value_bits - 1), (BLOCK, WIDTH)).to(tl.int16)
    values = codes.to(tl.float16, bitcast=True)
    if value_bits == 16:
        # Beyond the last token a page may hold anything, NaN too, and 0 * NaN is NaN.
        values = tl.where(valid[:, None], values, 0.0).to(tl.float16)
        up, down = power_for(tl.max(p, axis=1))
        acc += tl.dot((p * up[:, None]).to(tl.float16), values) * down[:, None]
    else:
        for g in tl.static_range(value_groups):
            where = words + base // 4 + GEOMETRY[TIER * FIELDS + VALUE_SCALES] // 4 + slot * value_groups + g
            step, zero = scale_pair(tl.load(where, mask=valid, other=0))
            scaled = p * step[None, :]
            # FP16 has few exponents: the largest of each row goes to its upper end.
            up, down = power_for(tl.max(scaled, axis=1))
            product = tl.dot((scaled * up[:, None]).to(tl.float16), values) * (down * _CODE)[:, None]
            product += tl.sum(p * zero[None, :], axis=1)[:, None]
            if value_groups > 1:
                product = tl.where((channel // (HEAD_DIM // value_groups) == g)[None, :], product, 0.0)
            acc += product
    return new_top, weight, acc


@triton.jit
def attention_kernel(
    units, words, tables, lengths, requests, query, partial, tops, weights, logits, bias, angles,
    table_stride, table_request, table_head, length_request, length_head, entries,
    query_request, query_head, query_channel, kv_heads, tiles, scale,
    GEOMETRY: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    TWO_TERMS: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    channel, own = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    member = own < GROUP
    at = query + row * query_request + (head * GROUP + own)[:, None] * query_head
    full = member[:, None] & (channel < HEAD_DIM)[None, :]
    exact = tl.load(at + channel[None, :] * query_channel, mask=full, other=0.0).to(tl.float32)
    up, down = power_for(tl.max(tl.abs(exact), axis=1))
    exact = exact * up[:, None]
    near = exact.to(tl.float16)
    rest = near
    query_sum = tl.sum(near.to(tl.float32), axis=1)
    if TWO_TERMS:
        rest = (exact - near.to(tl.float32)).to(tl.float16)
        query_sum += tl.sum(rest.to(tl.float32), axis=1)
    query_sum = query_sum * down
    along, across = exact, exact
    if BIAS:
        angle = tl.arange(0, HALF)
        inside = angle < HEAD_DIM // 2
        where = at + angle[None, :] * query_channel
        turned = member[:, None] & inside[None, :]
        first = tl.load(where, mask=turned, other=0.0).to(tl.float32)
        second = tl.load(where + HEAD_DIM // 2 * query_channel, mask=turned, other=0.0).to(tl.float32)
        b_first = tl.load(bias + head * HEAD_DIM + angle, mask=inside, other=0.0)[None, :]
        b_second = tl.load(bias + head * HEAD_DIM + HEAD_DIM // 2 + angle, mask=inside, other=0.0)[None, :]
        # q.RoPE(b, j) = along.cos(j) + across.sin(j)
        along, across = first * b_first + second * b_second, second * b_first - first * b_second

    top = tl.full((HEADS,), -_INF, tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    place = row * kv_heads + head
    if request >= 0:
        table = tables + request * table_request + head.to(tl.int64) * table_head
        length_at = lengths + request * length_request + head * length_head
        total = tl.full((), 0, tl.int32)
        for t in tl.static_range(TIERS):
            total += tiles_of(tl.load(length_at + t), GEOMETRY[t * FIELDS + TOKENS], BLOCK)
        each = (total + SPLITS - 1) // SPLITS
        begin, end = split * each, tl.minimum(split * each + each, total)
        before = tl.full((), 0, tl.int32)
        for t in tl.static_range(TIERS):
            length = tl.load(length_at + t)
            its_tiles = tiles_of(length, GEOMETRY[t * FIELDS + TOKENS], BLOCK)
            for tile in range(tl.maximum(begin - before, 0), tl.minimum(end - before, its_tiles)):
                column = before + tile
                logit_row = ((place * GROUP + own) * tiles + column) * BLOCK
                top, weight, acc = attend_tile(
                    units, words, table, table_stride, entries, tile, length, near, rest, down, query_sum, along,
                    across, angles, scale, top, weight, acc, logits, logit_row, member & (column < tiles),
                    GEOMETRY, t, PAGE_BYTES, HEAD_DIM, WIDTH, TWO_TERMS, BIAS, KEEP, BLOCK,
                )  # fmt: skip
            before += its_tiles
    result = place * SPLITS + split
    tl.store(tops + result * HEADS + own, top)
    tl.store(weights + result * HEADS + own, weight)
    tl.store(partial + (result * HEADS + own)[:, None] * WIDTH + channel[None, :], acc)


def decode_attention_triton(
    view, query: Tensor, *, layer: int, requests: Tensor, scale: float, update_scores: bool = True,
    newest: Tensor | None = None, bias=None, max_tokens: int | None = None, out: Tensor | None = None,
    splits: int | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Kernels of ``diffkv.reference_attention.decode_attention``; ``splits`` of each sequence and tokens in a ``block``
    are chosen from the size of the work when not given. FP32 queries are taken in two FP16 terms."""
    batch, query_heads, head_dim = query.shape
    kv_heads = view.tables.shape[3]
    if head_dim != view.layouts[0].head_dim:
        raise ValueError(f"query has {head_dim} channels, the pages {view.layouts[0].head_dim}")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are no multiple of {kv_heads} KV heads")
    group = query_heads // kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if out.shape != query.shape or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}; it must be contiguous and {list(query.shape)}, as query")
    if not batch:
        return out
    width, heads = padded(head_dim), max(16, triton.next_power_of_2(group))
    block = block or block_for(width, bias=bias is not None)
    bound = max_tokens or view.max_tokens
    # A page with an odd number of tokens leaves one place of its last pair empty.
    ratio = max((own.tokens + own.tokens % 2) / own.tokens for own in view.layouts)
    tiles = math.ceil((bound * ratio + len(view.layouts)) / block) + len(view.layouts)
    splits = splits or _splits(query.device, batch * kv_heads, tiles)
    single = {"dtype": torch.float32, "device": query.device}
    partial = torch.empty(batch * kv_heads * splits * heads * width, **single)
    tops, weights = (torch.empty(batch * kv_heads * splits * heads, **single) for _ in range(2))
    logits = torch.empty(batch * query_heads * tiles * block if update_scores else 1, **single)
    units, words = pool_views(view.pool)
    tables, lengths = view.tables[:, :, layer], view.lengths[:, layer]
    strides = (*tables.stride()[:3], *lengths.stride()[:2], tables.shape[-1])
    shape = {
        "GEOMETRY": geometry(view.layouts), "TIERS": len(view.layouts), "PAGE_BYTES": view.pool.shape[1],
        "HEAD_DIM": head_dim, "WIDTH": width, "GROUP": group, "HEADS": heads, "SPLITS": splits, "BLOCK": block,
    }  # fmt: skip
    attention_kernel[(splits, kv_heads, batch)](
        units, words, tables, lengths, requests, query, partial, tops, weights, logits,
        partial if bias is None else bias.bias[layer], partial if bias is None else bias.table, *strides,
        *query.stride(), kv_heads, tiles, scale * _LOG2_E, HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        TWO_TERMS=query.dtype == torch.float32, BIAS=bias is not None, KEEP=update_scores, num_stages=2, **shape,
    )  # fmt: skip
    chunks = splits if update_scores else 1
    merge_kernel[(chunks, kv_heads, batch)](
        words, tables, lengths, requests, out, partial, tops, weights, logits, requests if newest is None else newest,
        *strides, kv_heads, tiles, UPDATE=update_scores, SKIP_NEWEST=newest is not None,
        PADDED_SPLITS=triton.next_power_of_2(splits), CHUNKS=chunks, **shape,
    )  # fmt: skip
    return out


def block_for(width: int, *, bias: bool) -> int:
    """Tokens of a tile, so that it and its angles fit into the shared memory of an L40 (99 KiB)."""
    return (64 if width <= 128 else 32) // (2 if bias else 1)


def _splits(device: torch.device, work: int, tiles: int) -> int:
    """Programs a sequence is split over: enough for four on each multiprocessor, none with less than two tiles."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(triton.cdiv(4 * processors, work), triton.cdiv(tiles, 2), 64))
