"""Paged caches of given lengths with random codes: what kernels are timed on, where the shape is all that matters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.paged_view import PagedView

_CHUNK = 1 << 14  # pages filled at a time


def random_view(layouts: Sequence[PageLayout], lengths: Tensor, *, seed: int = 0) -> PagedView:
    """Pages for ``lengths`` int32 [requests, layers, kv_heads, tiers], in random order, on the device of ``lengths``.

    Codes are random; scales are such that keys and values are of about unit size; scores are 0 and positions count up
    from 0 in each page. One or two tiers.
    """
    if not 1 <= len(layouts) <= 2:
        raise ValueError(f"{len(layouts)} layouts; one or two tiers can be made")
    device = lengths.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([own.tokens for own in layouts], device=device)
    counts = -(-lengths.long() // tokens)
    entries = max(1, int(counts.sum(-1).max()))
    total = max(1, int(counts.sum()))
    order = torch.randperm(total, generator=generator, device=device).to(torch.int32)
    start = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    entry = torch.arange(entries, device=device)
    tables = torch.full((1, *lengths.shape[:3], entries), -1, dtype=torch.int32, device=device)
    pool = torch.zeros(total, layouts[0].page_bytes, dtype=torch.uint8, device=device)
    for tier, layout in enumerate(layouts):
        place = entry if tier == 0 else entries - 1 - entry
        held = place < counts[..., tier, None]
        ids = order[(start[..., tier, None] + place).clamp_max(total - 1)]
        tables[0] = torch.where(held, ids, tables[0])
        for chunk in ids[held].long().split(_CHUNK):
            _fill(pool, chunk, layout, generator)
    return PagedView(pool, tables, lengths.to(torch.int32), tuple(layouts))


def _fill(pool: Tensor, ids: Tensor, layout: PageLayout, generator: torch.Generator) -> None:
    """Random rows in the pages ``ids``."""
    pages = torch.zeros(len(ids), layout.page_bytes, dtype=torch.uint8, device=pool.device)
    starts, ends = layout.offsets, [*layout.offsets[1:], layout.page_bytes]
    for side, bits, groups in (
        (0, layout.precision.key_bits, layout.key_groups),
        (2, layout.precision.value_bits, layout.value_groups),
    ):
        codes = pages[:, starts[side] : ends[side]]
        if bits == 16:
            shape = (len(ids), codes.shape[1] // 2)
            codes.view(torch.float16).copy_(torch.randn(shape, generator=generator, device=pool.device))
            continue
        codes.random_(0, 256, generator=generator)
        # Codes from 0 to 2^bits - 1, evenly: a scale of 4 / 2^bits and a zero point of -2 span four units.
        words = pages[:, starts[side + 1] : starts[side + 1] + 4 * layout.tokens * groups].view(torch.float16)
        shape = (words.shape[0], words.shape[1] // 2)
        spread = 0.5 + torch.rand(shape, generator=generator, device=pool.device)
        words[:, 0::2], words[:, 1::2] = 4 / 2**bits * spread, -2.0
    positions = pages[:, starts[5] : starts[5] + 4 * layout.tokens].view(torch.int32)
    positions.copy_(torch.arange(layout.tokens, device=pool.device))
    pool[ids] = pages
