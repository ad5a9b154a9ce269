"""Second launch of decode attention: merge the parts of a split sequence, and add this step's attention to the scores.

Each token belongs to one program, and the probabilities it needs are final: no race, and no rescaling after the fact.
"""

import triton
import triton.language as tl
from diffkv_repro.kernels.pages import FIELDS, SCORES, TOKENS, locate, page_bytes_at, rounded_to, tiles_of

_INF = tl.constexpr(float("inf"))


@triton.jit
def update_tile(
    words, table, table_stride, entries, tile, length, logits, logit_row, logit_mask, log_sum, newest,
    GEOMETRY: tl.constexpr, TIER: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the largest probability over the query heads to the score of each token of a tile."""
    per_page: tl.constexpr = GEOMETRY[TIER * FIELDS + TOKENS]
    page, slot, valid = locate(tile * BLOCK + tl.arange(0, BLOCK), length, per_page)
    base = page_bytes_at(table, table_stride, entries, page, valid, TIER, PAGE_BYTES)
    at = logits + logit_row[:, None] + tl.arange(0, BLOCK)[None, :]
    logit = tl.load(at, mask=logit_mask[:, None], other=-_INF)
    given = tl.max(tl.exp2(logit - log_sum[:, None]), axis=0)
    if TIER == 0:
        valid = valid & (page * per_page + slot != newest)
    score = words + base // 4 + GEOMETRY[TIER * FIELDS + SCORES] // 4 + slot
    old = tl.load(score, mask=valid, other=0).to(tl.float32, bitcast=True)
    tl.store(score, (old + given).to(tl.int32, bitcast=True), mask=valid)


@triton.jit
def merge_kernel(
    words, tables, lengths, requests, out, partial, tops, weights, logits, newest,
    table_stride, table_request, table_head, length_request, length_head, entries, kv_heads, tiles,
    GEOMETRY: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr, UPDATE: tl.constexpr, SKIP_NEWEST: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    own, channel, split = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, PADDED_SPLITS)
    member = own < GROUP
    place = row * kv_heads + head
    at = (place * SPLITS + split)[:, None] * HEADS + own[None, :]
    given = (split < SPLITS)[:, None]
    top_of = tl.load(tops + at, mask=given, other=-_INF)
    top = tl.max(top_of, axis=0)
    shown = tl.where(top == -_INF, 0.0, top)
    weight = tl.sum(tl.load(weights + at, mask=given, other=0.0) * tl.exp2(top_of - shown[None, :]), axis=0)
    if chunk == 0:
        total = tl.zeros((HEADS, WIDTH), tl.float32)
        for part in range(SPLITS):
            result = place * SPLITS + part
            share = tl.exp2(tl.load(tops + result * HEADS + own) - shown)
            total += share[:, None] * tl.load(partial + (result * HEADS + own)[:, None] * WIDTH + channel[None, :])
        total = total / tl.where(weight > 0, weight, 1.0)[:, None]
        to = out + ((row * kv_heads + head) * GROUP + own)[:, None] * HEAD_DIM + channel[None, :]
        tl.store(
            to, rounded_to(total, out).to(out.dtype.element_ty), mask=member[:, None] & (channel < HEAD_DIM)[None, :]
        )
    if UPDATE:
        request = tl.load(requests + row).to(tl.int64)
        if request >= 0:
            log_sum = shown + tl.log2(tl.where(weight > 0, weight, 1.0))
            skipped = tl.full((), -1, tl.int32)
            if SKIP_NEWEST:
                skipped = tl.load(newest + place).to(tl.int32)
            table = tables + request * table_request + head.to(tl.int64) * table_head
            length_at = lengths + request * length_request + head * length_head
            before = tl.full((), 0, tl.int32)
            for t in tl.static_range(TIERS):
                length = tl.load(length_at + t)
                its_tiles = tiles_of(length, GEOMETRY[t * FIELDS + TOKENS], BLOCK)
                for tile in range(chunk, its_tiles, CHUNKS):
                    column = before + tile
                    logit_row = ((place * GROUP + own) * tiles + column) * BLOCK
                    update_tile(
                        words, table, table_stride, entries, tile, length, logits, logit_row,
                        member & (column < tiles), log_sum, skipped, GEOMETRY, t, PAGE_BYTES, BLOCK,
                    )  # fmt: skip
                before += its_tiles
