"""Torch twins of the attention kernels: attention over pages with its score update, and significance of a prompt."""

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.diffkv.paged_view import KeyBias, PagedView
from diffkv_repro.diffkv.reference import places, read_rows
from diffkv_repro.models.hf import AttentionCall


def decode_attention(
    view: PagedView, query: Tensor, *, layer: int, requests: Tensor, scale: float, update_scores: bool = True,
    newest: Tensor | None = None, bias: KeyBias | None = None, max_tokens: int | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query a request over the pages of all tiers, [requests, query_heads, head_dim] (section 5.3).

    ``query`` [requests, query_heads, head_dim]; ``requests`` int32 rows of the tables, -1 for none (output 0, as for
    a head without tokens). With ``update_scores`` the score of each token in its page grows by the largest
    probability that a query head of its KV head gives it, except the token in tier-0 slot ``newest`` int32
    [requests, kv_heads] (-1: no exception). With ``bias`` keys are stored without it. ``max_tokens`` bounds the
    tokens of a head; it changes how a kernel splits the work and no result. The result goes into ``out`` if given,
    which may be of another type. Sums are in the precision of ``query``, float32 at least. Raises ValueError for shapes
    that do not fit.
    """
    _check(view, query)
    exact = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // view.kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    out.zero_()
    for row, request in enumerate(requests.tolist()):
        for head in range(view.kv_heads if request >= 0 else 0):
            counts = view.lengths[request, layer, head].tolist()
            slots = [torch.arange(count, device=view.pool.device) for count in counts]
            parts = [read_rows(view, tier, request, layer, head, own) for tier, own in enumerate(slots)]
            key, value, _, positions = (torch.cat(side) for side in zip(*parts, strict=True))
            if not len(key):
                continue
            key = key.to(exact)
            if bias is not None:
                key = key + bias.rotated(layer, positions)[head]
            heads = slice(head * group, (head + 1) * group)
            weights = torch.softmax(query[row, heads].to(exact) @ key.T * scale, dim=-1)
            out[row, heads] = (weights @ value.to(exact)).to(out.dtype)
            if update_scores:
                given = weights.amax(dim=0).float()
                if newest is not None and 0 <= int(newest[row, head]) < counts[0]:
                    given[int(newest[row, head])] = 0
                _add_scores(view, request, layer, head, slots, given.split(counts))
    return out


def _add_scores(
    view: PagedView, request: int, layer: int, head: int, slots: list[Tensor], given: tuple[Tensor, ...]
) -> None:
    words = view.pool.view(torch.float32)
    for tier, (slot, more) in enumerate(zip(slots, given, strict=True)):
        tokens = view.layouts[tier].tokens
        page = view.pages(tier, request, layer, head, slot // tokens)
        *_, score_index, _ = places(view, tier, slot % tokens)
        words[page, score_index] += more


def _check(view: PagedView, query: Tensor) -> None:
    if query.shape[2] != view.head_dim:
        raise ValueError(f"query has {query.shape[2]} channels, the pages {view.head_dim}")
    if query.shape[1] % view.kv_heads:
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {view.kv_heads} KV heads")


def significance(query: Tensor, key: Tensor, rule: Significance, *, scale: float, lengths: Tensor) -> Tensor:
    """Scores that prompt tokens received, float32 [requests, kv_heads, tokens]: the maximum over the query heads of a
    KV head of the sums over its queries (section 4); 0 past the end of a prompt.

    ``query`` [requests, query_heads, tokens, head_dim], ``key`` [requests, kv_heads, tokens, head_dim], both after
    RoPE; ``lengths`` int32 [requests].
    """
    requests, kv_heads, tokens, _ = key.shape
    sums = torch.zeros(requests, kv_heads, tokens, dtype=torch.float32, device=key.device)
    for row, length in enumerate(lengths.tolist()):
        if length:
            own = (tensor[row : row + 1, :, :length] for tensor in (query, key, key))
            sums[row, :, :length] = rule.sums(PromptAttention(AttentionCall(0, *own, scale, None, None)))[0].amax(dim=1)
    return sums
