"""Tiers of prompt tokens and their places within them, without a sort: one pass with running counts (DiffKV 5.3)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def partition_kernel(
    tiers, slots, counts, sums, alphas, lengths, tokens, kv_heads, window, observed,
    TIERS: tl.constexpr, PADDED_TIERS: tl.constexpr, CLASSIFY: tl.constexpr, PARTITION: tl.constexpr,
    OWN_SCORE: tl.constexpr, BY_POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1), tl.program_id(0)
    base = (row * kv_heads + head).to(tl.int64) * tokens
    tier_index = tl.arange(0, PADDED_TIERS)
    before = tl.zeros((PADDED_TIERS,), tl.int32)
    length = tokens
    if CLASSIFY:
        length = tl.load(lengths + row)
    for start in range(0, tokens, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < tokens
        if CLASSIFY:
            first = column if OWN_SCORE else column + 1
            first = tl.where(observed > 0, tl.maximum(first, length - observed), first)
            count = tl.maximum(length - first, 1).to(tl.float32)
            mean = tl.div_rn(tl.load(sums + base + column, mask=inside, other=0.0), count)
            divisor = column + 1 if BY_POSITION else tl.zeros_like(column) + tl.maximum(length, 1)
            divisor = divisor.to(tl.float32)
            tier = tl.zeros((BLOCK,), tl.int32)
            for t in tl.static_range(TIERS):
                alpha = tl.load(alphas + t * kv_heads + head)
                threshold = tl.div_rn(tl.zeros_like(divisor) + alpha, divisor)
                if t < TIERS - 1:
                    tier += (mean <= threshold).to(tl.int32)
                else:
                    tier = tl.where(mean < threshold, -1, tier)
            tier = tl.where(column >= length - window, 0, tier)
            tier = tl.where(column >= length, -1, tier)
            tl.store(tiers + base + column, tier.to(tl.int8), mask=inside)
        else:
            tier = tl.load(tiers + base + column, mask=inside, other=-1).to(tl.int32)
        if PARTITION:
            own = ((tier[:, None] == tier_index[None, :]) & inside[:, None]).to(tl.int32)
            rank = before[None, :] + tl.cumsum(own, axis=0) - 1
            kept = (tier >= 0) & (tier < TIERS)
            slot = tl.where(kept, tl.sum(own * rank, axis=1), -1)
            tl.store(slots + base + column, slot, mask=inside)
            before += tl.sum(own, axis=0)
    if PARTITION:
        tl.store(counts + (row * kv_heads + head) * TIERS + tier_index, before, mask=tier_index < TIERS)


def partition_triton(tiers: Tensor, n_tiers: int) -> tuple[Tensor, Tensor]:
    """Kernel of ``diffkv.reference.partition``."""
    slots, counts = _outputs(tiers, n_tiers)
    _launch(tiers.contiguous(), slots, counts, n_tiers, PARTITION=True)
    return slots, counts


def classify_triton(
    sums: Tensor, lengths: Tensor, alphas: Tensor, *, window: int, observed: int, own_score: bool, by_position: bool,
    partition: bool,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    """Kernel of ``diffkv.reference.classify``, with ``partition`` both in one launch: tiers, slots and counts.

    ``alphas`` float32 [tiers, kv_heads].
    """
    n_tiers = len(alphas)
    tiers = torch.empty(sums.shape, dtype=torch.int8, device=sums.device)
    slots, counts = _outputs(tiers, n_tiers) if partition else (tiers, tiers)
    _launch(
        tiers, slots, counts, n_tiers, sums.contiguous(), alphas.contiguous(), lengths, window, observed,
        CLASSIFY=True, PARTITION=partition, OWN_SCORE=own_score, BY_POSITION=by_position,
    )  # fmt: skip
    return (tiers, slots, counts) if partition else tiers


def _outputs(tiers: Tensor, n_tiers: int) -> tuple[Tensor, Tensor]:
    slots = torch.empty(tiers.shape, dtype=torch.int32, device=tiers.device)
    return slots, torch.empty(*tiers.shape[:2], n_tiers, dtype=torch.int32, device=tiers.device)


def _launch(tiers, slots, counts, n_tiers, sums=None, alphas=None, lengths=None, window=0, observed=0, **options):
    requests, kv_heads, tokens = tiers.shape
    if not requests or not kv_heads:
        return
    options = {"CLASSIFY": False, "OWN_SCORE": False, "BY_POSITION": False} | options
    partition_kernel[(kv_heads, requests)](
        tiers, slots, counts, *((tiers if given is None else given) for given in (sums, alphas, lengths)),
        tokens, kv_heads, window, observed,
        TIERS=n_tiers, PADDED_TIERS=max(2, triton.next_power_of_2(n_tiers)),
        BLOCK=max(16, min(1024, triton.next_power_of_2(tokens))), **options,
    )  # fmt: skip
