"""``PagedView``: the tensors of a paged cache as kernels and their torch twins take them; and the rule they apply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.rules import Algorithm1, PolicyRule

PLAN_FIELDS = 8
"""Numbers of a head's plan for one step, -1 where there is nothing to do: tier-0 slot of the new token; of the victim
its tier and slot, and the tier and slot it moves to; of the candidate its tier-0 slot, and the tier and slot it moves
to. A slot equal to the length of its tier is appended; any other is taken over from a token that leaves it."""


@dataclass(frozen=True)
class PagedView:
    """Pages, page tables and lengths (DiffKV sections 5.1 and 5.2).

    ``pool`` uint8 [pages, page_bytes]. ``tables`` int32 [n_tables, max_requests, layers, kv_heads, entries]: tier 2k
    fills table k from the left, tier 2k + 1 from the right. ``lengths`` int32 [max_requests, layers, kv_heads, tiers]
    counts the tokens of each tier; token i lies in page i // layout.tokens, slot i % layout.tokens. One layout a tier.
    Sides of 16 bits hold FP16, whatever the model computes in. Raises ValueError where the parts do not fit together.
    """

    pool: Tensor
    tables: Tensor
    lengths: Tensor
    layouts: tuple[PageLayout, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layouts", tuple(self.layouts))
        if not self.layouts:
            raise ValueError("a paged cache has no layout; it needs one a tier")
        sizes = {(own.head_dim, own.page_bytes) for own in self.layouts}
        if len(sizes) > 1:
            raise ValueError(f"layouts are of different (head_dim, page_bytes): {sorted(sizes)}")
        page_bytes = self.layouts[0].page_bytes
        if self.pool.dtype != torch.uint8 or self.pool.ndim != 2 or self.pool.shape[1] != page_bytes:
            raise ValueError(f"pool is {_described(self.pool)}; it must be uint8 [pages, {page_bytes}]")
        if not self.pool.is_contiguous():
            raise ValueError("pool is not contiguous")
        if self.tables.dtype != torch.int32 or self.tables.ndim != 5:
            raise ValueError(f"tables is {_described(self.tables)}; it must be int32 of five dimensions")
        if self.tables.shape[0] != -(-self.tiers // 2):
            raise ValueError(f"{self.tables.shape[0]} tables hold {self.tiers} tiers; two tiers share one")
        if self.lengths.dtype != torch.int32 or self.lengths.shape != (*self.tables.shape[1:4], self.tiers):
            expected = [*self.tables.shape[1:4], self.tiers]
            raise ValueError(f"lengths is {_described(self.lengths)}; it must be int32 {expected}")
        if self.tables.stride(-1) != 1 or self.lengths.stride(-1) != 1:
            raise ValueError("tables and lengths must be contiguous in their last dimension")

    @property
    def tiers(self) -> int:
        return len(self.layouts)

    @property
    def layers(self) -> int:
        return self.tables.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.tables.shape[3]

    @property
    def head_dim(self) -> int:
        return self.layouts[0].head_dim

    @property
    def max_tokens(self) -> int:
        """Tokens of a head that its table entries can reach: a bound that needs no look at the lengths."""
        entries, per_table = self.tables.shape[-1], [self.layouts[k : k + 2] for k in range(0, self.tiers, 2)]
        return sum(entries * max(own.tokens for own in pair) for pair in per_table)

    def pages(self, tier: int, request: Tensor | int, layer: int, head: Tensor | int, page: Tensor) -> Tensor:
        """Page ids int64 of the ``page``-th pages of a tier, in the shape that the indices broadcast to."""
        entry = page if tier % 2 == 0 else self.tables.shape[-1] - 1 - page
        return self.tables[tier // 2, request, layer, head, entry].long()


@dataclass(frozen=True)
class PagedRule:
    """A policy's rules for all layers as tensors and numbers (see ``CompressionPolicy``).

    ``alphas`` float32 [layers, tiers, kv_heads]. ``observed`` is 0 where all later queries count, else how many of
    the last ones of the prompt do. A page has one running score a token, so the maximum over query heads is taken
    each step before summing (``group_max="each-step"``).
    """

    alphas: Tensor
    window: int
    observed: int
    own_score: bool
    prompt_by_position: bool
    decode_by_position: bool
    decode: Literal["algorithm-1", "two-minimum"]

    @classmethod
    def of(cls, rules: Sequence[PolicyRule], kv_heads: int) -> Self:
        """The rules of all layers, which may differ in their alphas only. Raises ValueError otherwise."""
        first = rules[0]
        if any(rule.score_width != 1 for rule in rules):
            raise ValueError('pages hold one score a token: the policy needs group_max="each-step"')
        if len({(r.window, r.significance, r.prompt_by_position, r.decode_by_position, type(r)) for r in rules}) > 1:
            raise ValueError("the rules of the layers differ in more than their alphas")
        alphas = torch.stack([torch.stack([alpha.expand(kv_heads) for alpha in rule.alphas]) for rule in rules])
        return cls(
            alphas=alphas.float().contiguous(),
            window=first.window,
            observed=first.significance.observed if first.significance.queries == "last" else 0,
            own_score=first.own_score,
            prompt_by_position=first.prompt_by_position,
            decode_by_position=first.decode_by_position,
            decode="algorithm-1" if isinstance(first, Algorithm1) else "two-minimum",
        )


@dataclass(frozen=True)
class KeyBias:
    """The rotated bias that keys are stored without (ours; in neither paper).

    ``bias`` float32 [layers, kv_heads, head_dim]; ``table`` float32 [positions, head_dim], the cosines of half the
    channels and then their sines, shared by all requests: channel i and i + head_dim / 2 turn together, as in
    transformers' ``rotate_half``.
    """

    bias: Tensor
    table: Tensor

    @classmethod
    def of(cls, biases: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Self:
        """From the bias [kv_heads, head_dim] of each layer and cos, sin [positions, head_dim] as transformers has them.

        Raises ValueError where the two halves of the channels do not turn by the same angles.
        """
        half = cos.shape[-1] // 2
        if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
            raise ValueError("cos and sin differ between the two halves of the channels: not a rotate_half embedding")
        table = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).float().contiguous()
        return cls(torch.stack(list(biases)).float().contiguous(), table)

    def rotated(self, layer: int, positions: Tensor) -> Tensor:
        """RoPE(bias, position), float32 [kv_heads, *positions.shape, head_dim]."""
        cos, sin = self.table[positions.long()].chunk(2, dim=-1)
        bias = self.bias[layer].view(-1, *[1] * positions.ndim, self.bias.shape[-1])
        first, second = bias.chunk(2, dim=-1)
        return torch.cat([first * cos + -second * sin, second * cos + first * sin], dim=-1)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
