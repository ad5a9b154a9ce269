"""Causal attention over blocks of queries, with the scores each token receives as a by-product.

A block of ``b`` queries meets only the keys it may see, so the largest tensor is
[batch * kv_heads, group * b, keys]: linear in the sequence length for a fixed ``b``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.models.hf import AttentionCall


@dataclass(frozen=True)
class BlockScores:
    """What one layer's attention shows.

    ``output`` [batch, heads, tokens, head_dim]; ``received`` [batch, heads, tokens]: the sum of the scores a token
    gets from strictly later queries, added up in float64; ``rows`` [batch, heads, len(rows), tokens]: the scores
    of single queries.
    """

    output: Tensor
    received: Tensor
    rows: Tensor


def blocked_attention(
    call: AttentionCall, *, block: int = 128, valid: Tensor | None = None, rows: tuple[int, ...] = ()
) -> BlockScores:
    """Softmax attention of a prefill (as many keys as queries), in blocks of ``block`` queries.

    ``valid`` [batch, tokens] is False at padding; padded tokens get and give no score. Scores are computed
    in float32 or better; the output has the dtype of ``call.query``.
    """
    batch, heads, tokens, dim = call.query.shape
    kv_heads = call.key.shape[1]
    if call.key.shape[2] != tokens:
        raise ValueError(f"{tokens} queries meet {call.key.shape[2]} keys: statistics are of a prefill without a cache")
    group = heads // kv_heads
    # Query heads of one KV head sit side by side, so keys and values are read once a block and never repeated.
    exact = torch.promote_types(call.query.dtype, torch.float32)
    # Tensor cores multiply half precision exactly and add in float32, so scores lose nothing by staying there; the
    # CPU has no such product, and float32 needs none.
    narrow = call.query.is_cuda and call.query.dtype in (torch.bfloat16, torch.float16)
    work = call.query.dtype if narrow else exact
    queries = call.query.to(work).view(batch, kv_heads, group, tokens, dim)
    keys_t = call.key.to(work).reshape(batch * kv_heads, tokens, dim).transpose(1, 2)
    values = call.value.to(work).reshape(batch * kv_heads, tokens, dim)
    output = torch.empty(batch, kv_heads, group, tokens, dim, dtype=call.query.dtype, device=call.query.device)
    received = torch.zeros(batch, kv_heads, group, tokens, dtype=torch.float64, device=call.query.device)
    shown = torch.zeros(batch, kv_heads, group, len(rows), tokens, dtype=exact, device=call.query.device)

    # One buffer for the scores of every block: blocks grow along the text, and a new allocation for each would
    # leave the heap in fragments that outweigh everything else.
    buffer = torch.empty(batch * heads * min(block, tokens) * tokens, dtype=exact, device=call.query.device)

    future = torch.ones(min(block, tokens), min(block, tokens), dtype=torch.bool, device=call.query.device).triu_(1)

    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        first = 0 if call.window is None else max(0, start - call.window + 1)
        flat = queries[:, :, :, start:stop].reshape(batch * kv_heads, group * (stop - start), dim)
        shape = (batch * kv_heads, group * (stop - start), stop - first)
        scores = buffer[: math.prod(shape)].view(shape)
        # beta 0 ignores what the buffer holds; alpha scales in float32, in the same pass.
        scaled = {"beta": 0, "alpha": call.scale, "out": scores}
        if narrow:
            torch.baddbmm(scores, flat, keys_t[:, :, first:stop], out_dtype=exact, **scaled)
        else:
            torch.baddbmm(scores, flat, keys_t[:, :, first:stop], **scaled)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        grouped = scores.view(batch, kv_heads, group, stop - start, stop - first)
        _mask(grouped, future[: stop - start, : stop - start], start, first, call.window, valid)
        torch.softmax(scores, dim=-1, out=scores)
        if valid is not None:
            # A padded query sees no key at all, and the softmax of nothing is NaN.
            grouped.masked_fill_(~valid[:, None, None, start:stop, None], 0.0)
        output[:, :, :, start:stop] = torch.bmm(scores.to(work), values[:, first:stop]).view(
            batch, kv_heads, group, stop - start, dim
        )
        for index, row in enumerate(rows):
            if start <= row < stop:
                shown[:, :, :, index, first:stop] = grouped[:, :, :, row - start]
        # A query is not "later" than itself. Zeroed rather than subtracted from the sum: the own score is
        # often a thousand times all the others together, and the difference would be rounding noise.
        torch.diagonal(grouped[..., start - first :], dim1=-2, dim2=-1).zero_()
        received[..., first:stop] += grouped.sum(dim=3)

    return BlockScores(
        output=output.view(batch, heads, tokens, dim),
        received=received.view(batch, heads, tokens).to(exact),
        rows=shown.view(batch, heads, len(rows), tokens),
    )


def _mask(scores: Tensor, future: Tensor, start: int, first: int, window: int | None, valid: Tensor | None) -> None:
    """Set to -inf what a query may not see: the future, what left the window, and padding."""
    length, span = scores.shape[-2:]
    scores[..., start - first :].masked_fill_(future, -torch.inf)
    if window is not None:
        query = torch.arange(start, start + length, device=scores.device)[:, None]
        key = torch.arange(first, first + span, device=scores.device)
        scores.masked_fill_(key <= query - window, -torch.inf)
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None, None, first : first + span], -torch.inf)
