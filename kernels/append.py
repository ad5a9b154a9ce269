"""Carry out the plan of a generation step: requantise what moves to another tier, write the new token (DiffKV 5.3)."""

import triton
import triton.language as tl
from diffkv_repro.kernels.pages import (
    FIELDS,
    KEY_BITS,
    KEY_GROUPS,
    KEY_SCALES,
    POSITIONS,
    SCORES,
    TOKENS,
    VALUE_BITS,
    VALUE_GROUPS,
    VALUE_SCALES,
    VALUES,
    geometry,
    padded,
    page_bytes_at,
    pool_views,
    read_side,
    rotated_bias,
    rounded_to,
    write_tokens,
)
from torch import Tensor


@triton.jit
def put(
    units, words, table, table_stride, entries, length, slot, key, value, score, position,
    GEOMETRY: tl.constexpr, TIER: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one token into a slot of a tier, which grows if the slot is its end."""
    per_page: tl.constexpr = GEOMETRY[TIER * FIELDS + TOKENS]
    slots = slot + tl.zeros((1,), tl.int32)
    here = slots >= 0
    page = page_bytes_at(table, table_stride, entries, slots // per_page, here, TIER, PAGE_BYTES)
    write_tokens(
        units, words, page, slots % per_page, here, key, value, score, position, GEOMETRY, TIER, HEAD_DIM, WIDTH
    )
    before = tl.load(length + TIER)
    tl.store(length + TIER, before + 1, mask=before == slot)


@triton.jit
def move(
    units, words, table, table_stride, entries, length, slot, to_slot, like, GEOMETRY: tl.constexpr,
    TIER: tl.constexpr, TO: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a token anew at another tier, from its dequantised values."""
    per_page: tl.constexpr = GEOMETRY[TIER * FIELDS + TOKENS]
    slots = slot + tl.zeros((1,), tl.int32)
    page = page_bytes_at(table, table_stride, entries, slots // per_page, slots >= 0, TIER, PAGE_BYTES)
    within = slots % per_page
    key = read_side(
        units, page, within, HEAD_DIM, WIDTH, GEOMETRY[TIER * FIELDS + KEY_BITS], GEOMETRY[TIER * FIELDS + KEY_GROUPS],
        0, GEOMETRY[TIER * FIELDS + KEY_SCALES], False,
    )  # fmt: skip
    value = read_side(
        units, page, within, HEAD_DIM, WIDTH, GEOMETRY[TIER * FIELDS + VALUE_BITS],
        GEOMETRY[TIER * FIELDS + VALUE_GROUPS], GEOMETRY[TIER * FIELDS + VALUES],
        GEOMETRY[TIER * FIELDS + VALUE_SCALES], True,
    )  # fmt: skip
    score = tl.load(words + page // 4 + GEOMETRY[TIER * FIELDS + SCORES] // 4 + within).to(tl.float32, bitcast=True)
    position = tl.load(words + page // 4 + GEOMETRY[TIER * FIELDS + POSITIONS] // 4 + within)
    # All threads have read before any writes: a slot may be taken over at once.
    tl.debug_barrier()
    put(
        units, words, table, table_stride, entries, length, to_slot, rounded_to(key, like), rounded_to(value, like),
        score, position, GEOMETRY, TO, PAGE_BYTES, HEAD_DIM, WIDTH,
    )  # fmt: skip


@triton.jit
def append_kernel(
    units, words, tables, lengths, keys, values, plans, requests, columns, bias, angles,
    table_stride, table_request, table_head, length_request, length_head, entries,
    key_request, key_head, key_channel, value_request, value_head, value_channel, kv_heads,
    GEOMETRY: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    if request >= 0:
        table = tables + request * table_request + head.to(tl.int64) * table_head
        length = lengths + request * length_request + head * length_head
        plan = plans + (row * kv_heads + head) * 8
        new, source, source_slot = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
        target, target_slot = tl.load(plan + 3), tl.load(plan + 4)
        leaver, its_tier, its_slot = tl.load(plan + 5), tl.load(plan + 6), tl.load(plan + 7)
        # In this order: the victim makes room for the candidate, which makes room for the new token.
        for s in tl.static_range(TIERS):
            for t in tl.static_range(s + 1, TIERS):
                if (source == s) & (target == t):
                    move(
                        units, words, table, table_stride, entries, length, source_slot, target_slot, keys, GEOMETRY,
                        s, t, PAGE_BYTES, HEAD_DIM, WIDTH,
                    )  # fmt: skip
        tl.debug_barrier()
        for t in tl.static_range(1, TIERS):
            if its_tier == t:
                move(
                    units, words, table, table_stride, entries, length, leaver, its_slot, keys, GEOMETRY,
                    0, t, PAGE_BYTES, HEAD_DIM, WIDTH,
                )  # fmt: skip
        tl.debug_barrier()
        if new >= 0:
            channel = tl.arange(0, WIDTH)[None, :]
            inside = channel < HEAD_DIM
            key_at = keys + row * key_request + head * key_head + channel * key_channel
            value_at = values + row * value_request + head * value_head + channel * value_channel
            key = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)
            position = tl.load(columns + row).to(tl.int32) + tl.zeros((1,), tl.int32)
            if BIAS:
                turned = rotated_bias(bias + head * HEAD_DIM, angles, position, position >= 0, HEAD_DIM, WIDTH)
                key = rounded_to(key - turned, keys)
            put(
                units, words, table, table_stride, entries, length, new, key, value, tl.zeros((1,), tl.float32),
                position, GEOMETRY, 0, PAGE_BYTES, HEAD_DIM, WIDTH,
            )  # fmt: skip


def append_triton(
    view, key: Tensor, value: Tensor, plan: Tensor, requests: Tensor, columns: Tensor, *, layer: int, bias=None
) -> None:
    """Kernel of ``diffkv.reference_step.append``: one launch a layer. Values beyond FP16 are not looked for."""
    rows, kv_heads, head_dim = key.shape
    if not rows:
        return
    units, words = pool_views(view.pool)
    tables, lengths = view.tables[:, :, layer], view.lengths[:, layer]
    append_kernel[(kv_heads, rows)](
        units, words, tables, lengths, key, value, plan.contiguous(), requests, columns,
        key if bias is None else bias.bias[layer], key if bias is None else bias.table,
        *tables.stride()[:3], *lengths.stride()[:2], tables.shape[-1], *key.stride(), *value.stride(), kv_heads,
        GEOMETRY=geometry(view.layouts), TIERS=len(view.layouts), PAGE_BYTES=view.pool.shape[1], HEAD_DIM=head_dim,
        WIDTH=padded(head_dim), BIAS=bias is not None, num_warps=1,
    )  # fmt: skip
