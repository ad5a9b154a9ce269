"""Paged caches for the tests of kernels: tables that a memory manager would have filled, and pages full of rubbish."""

import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import reference
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.paged_view import PagedView

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_view(
    tiers="K8V4 K4V2", *, head_dim=64, requests=3, layers=2, kv_heads=2, entries=12, page_bytes=None, seed=0,
    device=None,
):  # fmt: skip
    """No tokens yet; every table entry is a page of its own, in no order, and every byte is 0xFF (a NaN)."""
    device = device or DEVICE
    precisions = [Precision.parse(name) for name in tiers.split()]
    page_bytes = page_bytes or page_bytes_for(precisions, head_dim)
    layouts = tuple(PageLayout(precision, head_dim, page_bytes) for precision in precisions)
    shape = (-(-len(layouts) // 2), requests, layers, kv_heads, entries)
    count = shape[0] * requests * layers * kv_heads * entries
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randperm(count, generator=generator).to(torch.int32).view(shape)
    lengths = torch.zeros(requests, layers, kv_heads, len(layouts), dtype=torch.int32)
    pool = torch.full((count, page_bytes), 0xFF, dtype=torch.uint8)
    return PagedView(pool.to(device), tables.to(device), lengths.to(device), layouts)


def page_bytes_for(precisions, head_dim, tokens=7):
    """The smallest page that holds so many tokens, an odd number where it can be."""
    size = 128
    while True:
        try:
            if min(PageLayout(precision, head_dim, size).tokens for precision in precisions) >= tokens:
                return size
        except ValueError:
            pass
        size += 128


def random_rows(*shape, seed=0, dtype=torch.float32, device=None):
    """Rows of very different ranges, constant ones and the ends of FP16 among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator)
    flat = rows.view(-1, shape[-1])
    if len(flat) > 8:
        flat[1] = 0.0
        flat[2] = 3.14159
        flat[3] = 65504.0
        flat[4, 0], flat[4, 1] = 65504.0, -65504.0
        flat[5] = -7.0 + 1e-4 * flat[5]
        flat[6] *= 1e-7
    return rows.to(dtype).to(device or DEVICE)


def mixed_tiers(requests, kv_heads, tokens, tiers, lengths=None, seed=0, device=None):
    """Tiers int8 with some tokens dropped; those past ``lengths`` are."""
    generator = torch.Generator().manual_seed(seed)
    tier = torch.randint(-1, tiers, (requests, kv_heads, tokens), generator=generator).to(torch.int8)
    if lengths is not None:
        tier = tier.masked_fill(torch.arange(tokens) >= torch.tensor(lengths)[:, None, None], -1)
    return tier.to(device or DEVICE)


def moved(view, device):
    """A copy on another device."""
    return PagedView(*(part.to(device, copy=True) for part in (view.pool, view.tables, view.lengths)), view.layouts)


def filled_view(key, value, tier, tiers, *, layer=1, entries=None, seed=0, **shape):
    """A cache whose ``layer`` holds ``key``, ``value`` [requests, kv_heads, tokens, head_dim] at ``tier``.

    Row r of the batch is request ``rows[r]``, in reverse, so that mixing them up shows. Returns the view, ``rows`` and
    the scores. Packed on the CPU, so that the bytes are those that every device has to have.
    """
    device, key, value, tier = key.device, key.cpu(), value.cpu(), tier.cpu()
    requests, kv_heads, tokens, head_dim = key.shape
    view = empty_view(
        tiers, head_dim=head_dim, requests=requests, kv_heads=kv_heads, layers=layer + 1,
        entries=entries or 2 * (-(-tokens // 7) + 2), seed=seed, device=key.device, **shape,
    )  # fmt: skip
    rows = torch.arange(requests - 1, -1, -1, dtype=torch.int32)
    slots, counts = reference.partition(tier, len(view.layouts))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tier.shape, generator=generator)
    view.lengths[rows.long(), layer] = counts
    reference.pack(view, key, value, tier, slots, scores, rows, layer=layer)
    return moved(view, device), rows.to(device), scores.to(device)


def assert_close(name, actual, expected, tolerance=2e-3):
    """Largest difference over the largest expected value; what is not finite is named first."""
    assert bool(torch.isfinite(actual).all()), f"{name} is not finite everywhere"
    actual, expected = actual.double().cpu(), expected.double().cpu()
    error = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)) if actual.numel() else 0.0
    assert error <= tolerance, f"{name} is off by {error:.2e} of its largest value; {tolerance:.0e} is allowed"
