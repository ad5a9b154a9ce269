"""Quantise and pack a whole prompt into the pages of all tiers, in one launch (DiffKV section 5.3)."""

import triton
import triton.language as tl
from diffkv_repro.kernels.pages import (
    FIELDS,
    TOKENS,
    geometry,
    padded,
    page_bytes_at,
    pool_views,
    rotated_bias,
    rounded_to,
    write_tokens,
)
from torch import Tensor


@triton.jit
def pack_kernel(
    units, words, tables, keys, values, tiers, slots, scores, positions, requests, bias, angles,
    table_stride, table_request, table_head, entries,
    key_request, key_head, key_token, key_channel, value_request, value_head, value_token, value_channel,
    tokens, kv_heads,
    GEOMETRY: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, POSITIONS_GIVEN: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    if request >= 0:
        table = tables + request * table_request + head * table_head
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < tokens
        flat = (row * kv_heads + head) * tokens + token
        tier = tl.load(tiers + flat, mask=inside, other=-1).to(tl.int32)
        slot = tl.load(slots + flat, mask=inside, other=0)
        score = tl.load(scores + flat, mask=inside, other=0.0)
        position = token
        if POSITIONS_GIVEN:
            position = tl.load(positions + row * tokens + token, mask=inside, other=0)
        channel = tl.arange(0, WIDTH)
        full = inside[:, None] & (channel < HEAD_DIM)[None, :]
        wide, along = token.to(tl.int64)[:, None], channel[None, :]
        key_at = keys + row * key_request + head * key_head + wide * key_token + along * key_channel
        value_at = values + row * value_request + head * value_head + wide * value_token + along * value_channel
        key = tl.load(key_at, mask=full, other=0.0).to(tl.float32)
        value = tl.load(value_at, mask=full, other=0.0).to(tl.float32)
        if BIAS:
            turned = rotated_bias(bias + head * HEAD_DIM, angles, position, inside, HEAD_DIM, WIDTH)
            key = rounded_to(key - turned, keys)
        for t in tl.static_range(TIERS):
            per_page = GEOMETRY[t * FIELDS + TOKENS]
            own = tier == t
            if tl.max(own.to(tl.int32), axis=0) > 0:
                page = page_bytes_at(table, table_stride, entries, slot // per_page, own, t, PAGE_BYTES)
                write_tokens(
                    units, words, page, slot % per_page, own, key, value, score, position, GEOMETRY, t, HEAD_DIM, WIDTH
                )


def pack_triton(
    view, keys: Tensor, values: Tensor, tiers: Tensor, slots: Tensor, scores: Tensor, requests: Tensor, *,
    layer: int, positions: Tensor | None = None, bias=None,
) -> None:  # fmt: skip
    """Kernel of ``diffkv.reference.pack``. Values beyond FP16 are not looked for."""
    batch, kv_heads, tokens, head_dim = keys.shape
    if not batch or not tokens:
        return
    units, words = pool_views(view.pool)
    tables = view.tables[:, :, layer]
    block = max(2, min(32, 4096 // padded(head_dim)))
    pack_kernel[(triton.cdiv(tokens, block), kv_heads, batch)](
        units, words, tables, keys, values, tiers.contiguous(), slots.contiguous(), scores.contiguous(),
        slots if positions is None else positions.contiguous(), requests,
        scores if bias is None else bias.bias[layer], scores if bias is None else bias.table,
        tables.stride(0), tables.stride(1), tables.stride(2), tables.shape[-1], *keys.stride(), *values.stride(),
        tokens, kv_heads,
        GEOMETRY=geometry(view.layouts), TIERS=len(view.layouts), PAGE_BYTES=view.pool.shape[1], HEAD_DIM=head_dim,
        WIDTH=padded(head_dim), POSITIONS_GIVEN=positions is not None, BIAS=bias is not None, BLOCK=block,
    )  # fmt: skip
