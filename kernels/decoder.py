"""What a decoder computes between its matrix products, each in one launch: a generation step is many small ones."""

import torch
import triton
import triton.language as tl
from diffkv_repro.kernels.pages import rounded_to
from torch import Tensor


@triton.jit
def add_norm_kernel(
    hidden, delta, weight, total, normed, size, eps, ADD: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside, at = channel < size, row * size + channel
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = rounded_to(x + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32), total)
        tl.store(total + at, x.to(total.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    y = rounded_to(x * scale * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32), normed)
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)


def add_norm_triton(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Kernel of ``engine.ops.add_norm``."""
    hidden, size = hidden.contiguous(), hidden.shape[-1]
    normed = torch.empty_like(hidden)
    total = hidden if delta is None else torch.empty_like(hidden)
    rows, width = hidden.numel() // size, triton.next_power_of_2(size)
    if rows:
        add_norm_kernel[(rows,)](
            hidden, hidden if delta is None else delta.contiguous(), weight, total, normed, size, eps,
            ADD=delta is not None, WIDTH=width, num_warps=8 if width >= 2048 else 4,
        )  # fmt: skip
    return total, normed


@triton.jit
def rotate_kernel(
    query, key, out_query, out_key, cos, sin, positions, n_positions, heads, kv_heads,
    query_row, query_head, key_row, key_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    turned = tl.load(positions + row % n_positions).to(tl.int64) * HEAD_DIM + channel
    there = channel < half
    cos_first, cos_second = (
        tl.load(cos + turned, mask=there, other=0.0)[None, :],
        tl.load(cos + turned + half, mask=there, other=0.0)[None, :],
    )
    sin_first, sin_second = (
        tl.load(sin + turned, mask=there, other=0.0)[None, :],
        tl.load(sin + turned + half, mask=there, other=0.0)[None, :],
    )
    asked = (head < heads)[:, None] & there[None, :]
    stored = ((head >= heads) & (head < heads + kv_heads))[:, None] & there[None, :]
    kv_head = head - heads
    from_query = query + row * query_row + head[:, None] * query_head + channel[None, :]
    from_key = key + row * key_row + kv_head[:, None] * key_head + channel[None, :]
    first = tl.load(from_query, mask=asked, other=0.0).to(tl.float32)
    first += tl.load(from_key, mask=stored, other=0.0).to(tl.float32)
    second = tl.load(from_query + half, mask=asked, other=0.0).to(tl.float32)
    second += tl.load(from_key + half, mask=stored, other=0.0).to(tl.float32)
    new_first = rounded_to(first * cos_first - second * sin_first, query)
    new_second = rounded_to(second * cos_second + first * sin_second, query)
    to_query = out_query + (row * heads + head[:, None]) * HEAD_DIM + channel[None, :]
    to_key = out_key + (row * kv_heads + kv_head[:, None]) * HEAD_DIM + channel[None, :]
    kind = query.dtype.element_ty
    tl.store(to_query, new_first.to(kind), mask=asked)
    tl.store(to_query + half, new_second.to(kind), mask=asked)
    tl.store(to_key, new_first.to(kind), mask=stored)
    tl.store(to_key + half, new_second.to(kind), mask=stored)


def rotate_triton(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel of ``engine.ops.rotate``."""
    heads, head_dim = query.shape[-2:]
    kv_heads = key.shape[-2]
    outputs = tuple(torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in (query, key))
    flat_query, flat_key = (own.flatten(0, -3) for own in (query, key))
    rows, block = len(flat_query), 8
    if rows:
        rotate_kernel[(rows, triton.cdiv(heads + kv_heads, block))](
            flat_query, flat_key, *outputs, cos, sin, positions, positions.numel(), heads, kv_heads,
            flat_query.stride(0), flat_query.stride(1), flat_key.stride(0), flat_key.stride(1),
            HEAD_DIM=head_dim, HALF=triton.next_power_of_2(head_dim // 2), BLOCK=block, num_warps=2,
        )  # fmt: skip
    return outputs


@triton.jit
def gated_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    gate = tl.load(gate_up + row * 2 * size + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + channel, mask=inside, other=0.0).to(tl.float32)
    # exp(-gate) may be infinite: the quotient is then the 0 that it should be.
    activated = rounded_to(gate / (1.0 + tl.exp(-gate)), out)
    result = rounded_to(activated * up, out)
    tl.store(out + row * size + channel, result.to(out.dtype.element_ty), mask=inside)


def gated_triton(gate_up: Tensor) -> Tensor:
    """Kernel of ``engine.ops.gated``."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    rows, block = gate_up.numel() // (2 * size), 1024
    if rows:
        gated_kernel[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out
