"""Non-uniform levels: a codebook for normalised values, found by weighted k-means in one dimension."""

import torch
from torch import Tensor

BINS = 4096
_ROUNDS = 50


def fit(values: Tensor, weights: Tensor, levels: int) -> Tensor:
    """FP16 codebook [levels], ascending, of ``values`` [n] within -1 to 1 with ``weights`` [n] of at least 0.

    Lloyd's iteration from the weighted quantiles. Values are sorted into 4096 equal bins first, and a bin belongs to
    one level as a whole: a boundary is off by 1/4096 at most, a centre still is the mean of the values themselves.
    A uniform grid where there is no weight at all.
    """
    if values.numel() == 0 or not bool((weights > 0).any()):
        return torch.linspace(-1, 1, levels, device=values.device).half()
    position = ((values.double() + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
    weights = weights.double()
    mass = torch.bincount(position, weights, BINS)
    moment = torch.bincount(position, weights * values.double(), BINS)
    # With a zero in front, a difference of two sums is the sum of the bins in between.
    mass, moment = (torch.nn.functional.pad(part.cumsum(0), (1, 0)) for part in (mass, moment))
    middle = (torch.arange(BINS, device=values.device) + 0.5) * (2 / BINS) - 1
    share = (torch.arange(levels, device=values.device) + 0.5) / levels
    centres = middle[torch.searchsorted(mass[1:], share * mass[-1]).clamp_(max=BINS - 1)].double()
    edges = None
    for _ in range(_ROUNDS):
        new = torch.searchsorted(middle, ((centres[1:] + centres[:-1]) / 2).float())
        if edges is not None and torch.equal(new, edges):
            break
        edges = new
        bounds = torch.nn.functional.pad(edges, (1, 1))
        bounds[-1] = BINS
        inside, total = mass[bounds].diff(), moment[bounds].diff()
        centres = torch.where(inside > 0, total / inside.clamp_min(1e-300), centres)  # an empty level stays
    return centres.half().sort().values


def nearest(values: Tensor, codebook: Tensor) -> Tensor:
    """Codes uint8 like ``values`` [batch, ...] of the nearest level in ``codebook`` [batch, levels]."""
    edges = (codebook[:, 1:].float() + codebook[:, :-1].float()) / 2
    return torch.searchsorted(edges, values.flatten(1)).to(torch.uint8).view(values.shape)


def look_up(codes: Tensor, codebook: Tensor) -> Tensor:
    """Levels in float32 of ``codes`` [batch, ...]."""
    return codebook.float().gather(1, codes.flatten(1).long()).view(codes.shape)
