"""Scores that prompt tokens receive, in blocks, never as a matrix of queries times keys (DiffKV section 4).

A first pass leaves the logarithm of each query's sum of exponents, for few queries in several parts of the keys, so
that all of the device has work; a second one goes over blocks of keys and adds up the probabilities of the queries that
count.
"""

import torch
import triton
import triton.language as tl
from diffkv_repro.kernels.pages import padded
from torch import Tensor

_INF = tl.constexpr(float("inf"))
_LOG2_E = 1.4426950408889634
_PROGRAMS = 264  # of the first pass that are worth splitting up for: two for each multiprocessor of a large GPU
_MOST_PARTS = 16


@triton.jit
def load_rows(base, row, stride, inside, channel, channel_stride, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """Rows [n, WIDTH] for a matrix instruction, in their own type or, without one, in float32."""
    at = base + row.to(tl.int64)[:, None] * stride + channel[None, :] * channel_stride
    rows = tl.load(at, mask=inside[:, None] & (channel < HEAD_DIM)[None, :], other=0.0)
    return rows if NATIVE else rows.to(tl.float32)


@triton.jit
def log_sum_kernel(
    query, key, lengths, log_sums,
    query_request, query_head, query_token, query_channel, key_request, key_head, key_token, key_channel,
    heads, rows, observed, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    index = block * QUERIES + tl.arange(0, QUERIES)
    # With observed queries, row 0 is the first of them.
    start = tl.where(observed > 0, tl.maximum(length - observed, 0), 0)
    token, channel = start + index, tl.arange(0, WIDTH)
    asked = load_rows(
        query + request * query_request + head * query_head, token, query_token, token < length, channel,
        query_channel, HEAD_DIM, NATIVE,
    )  # fmt: skip
    key_base = key + request * key_request + (head // GROUP) * key_head
    top = tl.full((QUERIES,), -_INF, tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    end = tl.minimum(start + (block + 1) * QUERIES, length)
    share = tl.cdiv(tl.cdiv(end, KEYS), PARTS) * KEYS
    for first in range(part * share, tl.minimum((part + 1) * share, end), KEYS):
        at = first + tl.arange(0, KEYS)
        keys = load_rows(key_base, at, key_token, at < length, channel, key_channel, HEAD_DIM, NATIVE)
        logit = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        logit = tl.where((at[None, :] <= token[:, None]) & (at < length)[None, :], logit, -_INF)
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        shown = tl.where(new_top == -_INF, 0.0, new_top)
        weight = weight * tl.exp2(top - shown) + tl.sum(tl.exp2(logit - shown[:, None]), axis=1)
        top = new_top
    result = tl.where(weight > 0, top + tl.log2(tl.where(weight > 0, weight, 1.0)), -_INF)
    at = ((request * heads + head) * PARTS + part) * rows + index
    tl.store(log_sums + at, tl.where(token < length, result, -_INF), mask=index < rows)


@triton.jit
def whole_log_sum(log_sums, index, there, rows, PARTS: tl.constexpr):
    """The sum over all parts of the keys; infinite, so that it gives nothing, for a query that is not there."""
    top = tl.load(log_sums + index, mask=there, other=-_INF)
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(log_sums + part * rows + index, mask=there, other=-_INF))
    found = top > -_INF
    if PARTS > 1:
        weight = tl.zeros_like(top)
        for part in tl.static_range(PARTS):
            own = tl.load(log_sums + part * rows + index, mask=there, other=-_INF)
            weight += tl.where(found, tl.exp2(own - tl.where(found, top, 0.0)), 1.0)
        top += tl.log2(weight)
    return tl.where(found, top, _INF)


@triton.jit
def received_kernel(
    query, key, lengths, log_sums, sums,
    query_request, query_head, query_token, query_channel, key_request, key_head, key_token, key_channel,
    kv_heads, tokens, rows, observed, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
    OWN_SCORE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block, head, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    at, channel = block * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    best = tl.zeros((KEYS,), tl.float32)
    if block * KEYS < length:
        keys = load_rows(
            key + request * key_request + head * key_head, at, key_token, at < length, channel, key_channel, HEAD_DIM,
            NATIVE,
        )  # fmt: skip
        start = tl.where(observed > 0, tl.maximum(length - observed, 0), 0)
        for member in tl.static_range(GROUP):
            query_base = query + request * query_request + (head * GROUP + member) * query_head
            own_sums = log_sums + (request * kv_heads * GROUP + head * GROUP + member) * PARTS * rows
            received = tl.zeros((KEYS,), tl.float32)
            # No query before the block of keys sees any of it.
            for first in range(tl.maximum(block * KEYS - start, 0) // QUERIES * QUERIES, length - start, QUERIES):
                index = first + tl.arange(0, QUERIES)
                token = start + index
                there = token < length
                asked = load_rows(query_base, token, query_token, there, channel, query_channel, HEAD_DIM, NATIVE)
                log_sum = whole_log_sum(own_sums, index, there, rows, PARTS)
                logit = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
                seen = at[None, :] <= token[:, None] if OWN_SCORE else at[None, :] < token[:, None]
                seen = seen & there[:, None] & (at < length)[None, :]
                received += tl.sum(tl.where(seen, tl.exp2(logit - log_sum[:, None]), 0.0), axis=0)
            best = tl.maximum(best, received)
    tl.store(sums + (request * kv_heads + head) * tokens + at, best, mask=at < tokens)


def significance_triton(
    query: Tensor, key: Tensor, *, observed: int, own_score: bool, scale: float, lengths: Tensor,
    log_sums: Tensor | None = None, block: tuple[int, int] | None = None, parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Kernels of ``diffkv.reference_attention.significance``; ``observed`` 0 counts all later queries, else so many of
    the last ones. ``log_sums`` float32 [requests, query_heads, tokens], natural logarithms as attention kernels return
    them, spares the first pass where all queries count. ``block`` is how many queries meet how many keys at a time, and
    ``parts`` into how many the keys are split in the first pass.
    Raises ValueError for shapes that do not fit.
    """
    requests, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    if key.shape[2] != tokens:
        raise ValueError(f"{tokens} queries meet {key.shape[2]} keys: significance is of a whole prompt")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    sums = torch.empty(requests, kv_heads, tokens, dtype=torch.float32, device=key.device)
    if not sums.numel():
        return sums
    rows = min(observed, tokens) if observed else tokens
    native = query.is_cuda and query.dtype == key.dtype != torch.float32
    few = 64 if padded(head_dim) <= 128 else 32
    # A wide block of keys for few queries: the fewer programs, the less often the queries are loaded.
    queries, keys = block or (few, 2 * few if native and observed else few)
    if log_sums is not None and (observed or log_sums.shape != query.shape[:3]):
        raise ValueError(
            f"log_sums is {list(log_sums.shape)}; it must be {list(query.shape[:3])}, and all later queries count"
        )
    # The interpreter has no matrix product of bfloat16.
    shape = {
        "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "WIDTH": padded(head_dim),
        "NATIVE": native, "QUERIES": queries, "KEYS": keys,
    }  # fmt: skip
    strides, base_two = (*query.stride(), *key.stride()), scale * _LOG2_E
    if log_sums is None:
        blocks = triton.cdiv(rows, queries)
        spare = min(_MOST_PARTS, _PROGRAMS // (blocks * heads * requests), triton.cdiv(tokens, 2 * keys))
        shape["PARTS"] = parts = parts or max(1, spare)
        log_sums = torch.empty(requests, heads, parts, rows, dtype=torch.float32, device=key.device)
        log_sum_kernel[(blocks * parts, heads, requests)](
            query, key, lengths, log_sums, *strides, heads, rows, observed, base_two, **shape
        )
    else:
        shape["PARTS"], log_sums = 1, (log_sums.float() * _LOG2_E).contiguous()
    received_kernel[(triton.cdiv(tokens, keys), kv_heads, requests)](
        query, key, lengths, log_sums, sums, *strides, kv_heads, tokens, rows, observed, base_two,
        OWN_SCORE=own_score, **shape,
    )  # fmt: skip
    return sums
