"""``TierReplay``: shares of tokens in each tier, recorded on a real model, put upon a model of random weights.

Random weights attend evenly, so that a policy would keep everything or nothing. Speed depends on how many tokens each
head keeps in each tier and not on which, so a measurement at a paper's shape replays the shares of a real model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.diffkv.paged_view import PLAN_FIELDS


@dataclass(frozen=True)
class TierReplay:
    """``shares`` float32 [layers, kv_heads, tiers] of the tokens outside the window; the rest to 1 is pruned.

    Which token goes where is drawn from ``seed``, the layer, the head and the position, so it is the same in every
    run. ``source`` says where the shares come from.
    """

    shares: Tensor
    source: str
    seed: int = 0

    def __post_init__(self) -> None:
        sound = (self.shares >= 0).all() and (self.shares.sum(-1) <= 1 + 1e-5).all()  # NaN is not
        if self.shares.ndim != 3 or not self.shares.numel() or not bool(sound):
            raise ValueError("shares must be [layers, kv_heads, tiers], finite, not negative, of a sum of at most 1")

    @classmethod
    def even(cls, shares: list[float], layers: int, kv_heads: int, device: torch.device | str, seed: int = 0):
        """The same shares for every head."""
        table = torch.tensor(shares, device=device).expand(layers, kv_heads, -1).contiguous()
        return cls(table, f"the same {shares} for every head", seed)

    def spread(self, layers: int, kv_heads: int, device: torch.device | str) -> "TierReplay":
        """For another shape: its heads take the recorded heads' shares in turn, so that the spread over heads stays."""
        if tuple(self.shares.shape[:2]) == (layers, kv_heads):
            return TierReplay(self.shares.to(device), self.source, self.seed)
        flat = self.shares.reshape(-1, self.shares.shape[-1])
        stride = 7919 if len(flat) % 7919 else 1  # a prime, so that every head has its turn
        index = torch.arange(layers * kv_heads, device=flat.device) * stride % len(flat)
        return TierReplay(flat[index].view(layers, kv_heads, -1).to(device), self.source, self.seed)

    def check(self, layers: int, kv_heads: int, tiers: int) -> None:
        """ValueError unless the shares are for such a cache."""
        if tuple(self.shares.shape) != (layers, kv_heads, tiers):
            raise ValueError(f"shares are {list(self.shares.shape)}; the cache has {[layers, kv_heads, tiers]}")

    def prompt(self, layer: int, lengths: Tensor, tokens: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tiers int8, slots int32 [requests, kv_heads, tokens] and counts int32 [requests, kv_heads, tiers]."""
        from diffkv_repro.diffkv.paged_ops import partition

        column = torch.arange(tokens, device=lengths.device)
        kv_heads, tiers = self.shares.shape[1:]
        head = torch.arange(kv_heads, device=lengths.device)[:, None]
        tier = self._tier(self.shares[layer][:, None], self._draw(layer, head, column))  # [kv_heads, tokens]
        tier = tier.expand(len(lengths), -1, -1)
        tier = tier.masked_fill((column >= lengths[:, None] - window)[:, None], 0)
        tier = tier.masked_fill((column >= lengths[:, None])[:, None], -1).contiguous()
        slots, counts = partition(tier, tiers)
        return tier, slots, counts

    def step(self, lengths: Tensor, columns: Tensor, window: int) -> Tensor:
        """The plan int32 [layers, batch, kv_heads, PLAN_FIELDS] of a step; ``lengths`` int32 [layers, batch, kv_heads,
        tiers]. The token that leaves the window goes by its share: it stays, moves to a later tier, or makes room."""
        layers, batch, kv_heads, _ = lengths.shape
        leaves = (columns - window).clamp_min(0)[None, :, None]
        layer = torch.arange(layers, device=lengths.device)[:, None, None]
        head = torch.arange(kv_heads, device=lengths.device)
        tier = self._tier(self.shares[:, None], self._draw(layer, head, leaves)).to(torch.int32)
        tier = tier.masked_fill((columns < window)[None, :, None], 0)
        first, stays = lengths[..., 0], tier == 0
        # Any slot before the window's will do: what it holds is random.
        slot = torch.where(stays, first, (first - window).clamp_min(0))
        moved = tier > 0
        end = lengths.gather(-1, tier.clamp_min(0).long()[..., None])[..., 0]
        plan = torch.full((layers, batch, kv_heads, PLAN_FIELDS), -1, dtype=torch.int32, device=lengths.device)
        plan[..., 0] = slot
        for field, value in ((5, slot), (6, tier), (7, end)):
            plan[..., field] = torch.where(moved, value, -1)
        return plan

    def _draw(self, layer: Tensor | int, head: Tensor, position: Tensor) -> Tensor:
        """Numbers from 0 to 1 by a mixing of integers, which a CUDA graph can hold."""
        x = position.long() * 2654435761 + head * 40503 + layer * 69069 + self.seed * 97
        for shift, factor in ((16, 73244475), (15, 73244475), (16, 1)):
            x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
        return x.float() / 2**31

    @staticmethod
    def _tier(shares: Tensor, draw: Tensor) -> Tensor:
        """Tier int8 where ``draw`` falls in the cumulated ``shares`` [..., tiers]; -1 beyond their sum."""
        edges = shares.cumsum(-1)
        tier = (draw[..., None] >= edges).sum(-1)
        return tier.masked_fill(tier == shares.shape[-1], -1).to(torch.int8)
