"""What a decoder computes between its matrix products: one Triton kernel each on a GPU, their torch twins elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkv_repro.core.dispatch import uses_triton


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``hidden`` + ``delta`` [..., hidden] (None: nothing is added), and its RMS norm times ``weight`` [hidden]."""
    if uses_triton(hidden):
        from diffkv_repro.kernels.decoder import add_norm_triton

        return add_norm_triton(hidden, delta, weight, eps)
    total = hidden if delta is None else hidden + delta
    return total, F.rms_norm(total, (total.shape[-1],), weight, eps)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE of queries [..., heads, head_dim] and keys [..., kv_heads, head_dim], new and contiguous.

    ``cos``, ``sin`` float32 [max_positions, head_dim]; ``positions`` [batch], or [1, tokens] for all of a batch of
    prompts. Channels lie one after the other in memory.
    """
    if uses_triton(query):
        from diffkv_repro.kernels.decoder import rotate_triton

        return rotate_triton(query, key, cos, sin, positions)
    factors = [own[positions][..., None, :].to(query.dtype) for own in (cos, sin)]
    return _turned(query, *factors), _turned(key, *factors)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def gated(gate_up: Tensor) -> Tensor:
    """SiLU of the first half [..., n] of ``gate_up`` [..., 2 n] times the second half."""
    if uses_triton(gate_up):
        from diffkv_repro.kernels.decoder import gated_triton

        return gated_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
