"""Stored tokens out of their pages and into others, byte for byte: what moves a request without decoding it.

A row is a token of a tier: six pieces of bytes, those of a page's segments (``layout``). Rows go layer by layer and
head by head, in the order of their slots. What lies in a page beside its tokens does not come along: it may be another
request's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.paged_view import PagedView

_VALUES, SCORES = 2, 4  # which of the segments hold value codes and scores


def take_rows(view: PagedView, request: int, layers: Sequence[int], tier: int) -> list[Tensor]:
    """Key codes, key scales, value codes, value scales, scores and positions, uint8 [n, bytes] each, layer by layer."""
    page, ids, there = _places(view, request, layers, tier)
    parts = _segments(view.pool[ids], page)
    parts[_VALUES] = parts[_VALUES].flatten(-2).flatten(-3, -2)[:, : page.tokens]
    return [part[there] for part in parts]


def put_rows(view: PagedView, request: int, layers: Sequence[int], tier: int, rows: Sequence[Tensor]) -> None:
    """The inverse of :func:`take_rows`, for as many rows as the tier's lengths say; the rest of their pages is zero."""
    page, ids, there = _places(view, request, layers, tier)
    pages = torch.zeros(len(ids), page.page_bytes, dtype=torch.uint8, device=ids.device)
    for index, (segment, own) in enumerate(zip(_segments(pages, page), rows, strict=True)):
        width = own.shape[1]
        spread = torch.zeros(len(ids), page.tokens + page.tokens % 2, width, dtype=torch.uint8, device=ids.device)
        spread[:, : page.tokens][there] = own.to(ids.device)
        if index == _VALUES:
            segment.copy_(spread.unflatten(-1, (width // 2, 2)).unflatten(1, (-1, 2)))
        else:
            segment.copy_(spread[:, : page.tokens])
    view.pool[ids] = pages


def _places(view: PagedView, request: int, layers: Sequence[int], tier: int) -> tuple[PageLayout, Tensor, Tensor]:
    """The tier's layout; ids int64 [k] of its pages in the order of layers, heads and pages; and which of their slots
    hold a token, bool [k, tokens]."""
    page, device = view.layouts[tier], view.lengths.device
    layer = torch.tensor(list(layers), device=device)
    counts = view.lengths[request, layer, :, tier]
    first = torch.arange(-(-int(counts.max()) // page.tokens), device=device) * page.tokens
    row, head, number = (first < counts[..., None]).nonzero(as_tuple=True)
    ids = view.pages(tier, request, layer[row], head, number)
    left = counts[row, head] - number * page.tokens
    return page, ids, torch.arange(page.tokens, device=device) < left[:, None]


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
