"""Stored tokens out of their pages and into others, byte for byte: what moves a request without decoding it.

A row is a token of a tier: six pieces of bytes, those of a page's segments (``layout``). Rows go head by head, in the
order of their slots. What lies in a page beside its tokens does not come along: it may be another request's.
"""

import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.paged_view import PagedView

_VALUES, SCORES = 2, 4  # which of the segments hold value codes and scores


def take_rows(view: PagedView, request: int, layer: int, tier: int) -> list[Tensor]:
    """Key codes, key scales, value codes, value scales, scores and positions, uint8 [n, bytes] each."""
    page, ids, there = _places(view, request, layer, tier)
    parts = _segments(view.pool[ids], page)
    parts[_VALUES] = parts[_VALUES].flatten(-2).flatten(-3, -2)[..., : page.tokens, :]
    return [part[there] for part in parts]


def put_rows(view: PagedView, request: int, layer: int, tier: int, rows: list[Tensor]) -> None:
    """The inverse of :func:`take_rows`, for as many rows as the tier's lengths say; the rest of their pages is zero."""
    page, ids, there = _places(view, request, layer, tier)
    pages = torch.zeros(*ids.shape, page.page_bytes, dtype=torch.uint8, device=ids.device)
    for index, (segment, own) in enumerate(zip(_segments(pages, page), rows, strict=True)):
        spread = torch.zeros(*there.shape, own.shape[1], dtype=torch.uint8, device=ids.device)
        spread[there] = own.to(ids.device)
        if index == _VALUES:
            even = torch.nn.functional.pad(spread, (0, 0, 0, page.tokens % 2))
            spread = even.unflatten(-1, (own.shape[1] // 2, 2)).unflatten(-3, (segment.shape[-4], 2))
        segment.copy_(spread)
    held = there[..., 0]
    view.pool[ids[held]] = pages[held]


def _places(view: PagedView, request: int, layer: int, tier: int) -> tuple[PageLayout, Tensor, Tensor]:
    """The tier's layout, its page ids [kv_heads, pages] (0 for none), and which slots hold a token, bool
    [kv_heads, pages, tokens]."""
    page, counts = view.layouts[tier], view.lengths[request, layer, :, tier]
    number = torch.arange(-(-int(counts.max()) // page.tokens), device=counts.device)
    heads = torch.arange(len(counts), device=counts.device)
    at = (number * page.tokens)[:, None] + torch.arange(page.tokens, device=counts.device)
    there = at < counts[:, None, None]
    ids = view.pages(tier, request, layer, heads[:, None], number)
    return page, ids.masked_fill(~there[..., 0], 0), there


def _segments(pages: Tensor, page: PageLayout) -> list[Tensor]:
    """Views of pages uint8 [..., page_bytes]: [..., tokens, bytes], values as they lie, [..., pairs, 2, units, 2]."""
    widths = page.key_row_bytes, 4 * page.key_groups, page.value_row_bytes, 4 * page.value_groups, 4, 4
    parts = []
    for index, (start, width) in enumerate(zip(page.offsets, widths, strict=True)):
        tokens = page.tokens + page.tokens % 2 if index == _VALUES else page.tokens
        segment = pages[..., start : start + tokens * width]
        if index == _VALUES:  # the 16-bit units of two neighbouring tokens take turns
            parts.append(segment.unflatten(-1, (tokens // 2, width // 2, 2, 2)).transpose(-2, -3))
        else:
            parts.append(segment.unflatten(-1, (tokens, width)))
    return parts
