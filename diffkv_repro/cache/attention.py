"""Attention of new tokens over a cache that has been brought back to dense keys and values."""

import torch
from torch import Tensor

from diffkv_repro.models.hf import AttentionCall


def attend(call: AttentionCall, key: Tensor, value: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, n, head_dim] and scores [batch, kv_heads, group, n, columns] in float32.

    ``key``, ``value`` [batch, kv_heads, columns, head_dim], the last n columns being the queries' own; ``present``
    [batch, kv_heads, columns] is False where a head holds nothing, None where all is there. The softmax runs over what
    is there.
    """
    batch, heads, count, dim = call.query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    query = call.query.float().reshape(batch, kv_heads, -1, dim)
    scores = torch.matmul(query, key.float().transpose(-1, -2)).mul_(call.scale)
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    scores = scores.view(batch, kv_heads, heads // kv_heads, count, columns)
    if present is not None:
        scores.masked_fill_(~present[:, :, None, None, :], -torch.inf)
    if count > 1 or call.window is not None:
        column = torch.arange(columns, device=key.device)
        own = column[columns - count :, None]
        hidden = column > own
        if call.window is not None:
            hidden |= column <= own - call.window
        scores.masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    output = torch.matmul(weights.view(batch, kv_heads, -1, columns), value.float())
    return output.view(batch, heads, count, dim).to(call.query.dtype), weights
