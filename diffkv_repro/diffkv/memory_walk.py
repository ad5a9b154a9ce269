"""A random walk of the memory manager beside the oracle: is every page, at any time, in exactly one place?"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.oracle import OracleManager

TIERS = ("K8V4", "K4V2", "K2V2", "K2V1")
_LONGEST = 14


@dataclass(frozen=True)
class Walk:
    """What a walk did and found; the state was compared after every operation.

    ``done`` counts operations by name, ``refused`` those that found too few pages. ``lost_or_shared`` is the most
    pages that at one time were nowhere or in more than one place, ``misplaced`` the most places whose page was not
    the oracle's. ``laps`` says how often recycling went round the list, ``exhausted`` how often nothing was free.
    """

    done: Mapping[str, int]
    refused: int
    lost_or_shared: int
    misplaced: int
    laps: float
    exhausted: int

    @property
    def operations(self) -> int:
        """All that were tried."""
        return sum(self.done.values()) + self.refused


def random_walk(
    operations: int, *, seed: int, tiers: int = 2, pages: int = 36, requests: int = 3,
    device: torch.device | str = "cpu",
) -> Walk:  # fmt: skip
    """Admit, compact, step (with a token for heads at random) and release, at random, on both managers.

    The pool is small, so that it runs empty and goes round many times. Pages of 256 bytes at head_dim 32 hold a few
    tokens each. Raises ValueError for ``tiers`` that are not 1 to 4.
    """
    if not 1 <= tiers <= len(TIERS):
        raise ValueError(f"tiers is {tiers}; allowed are 1 to {len(TIERS)}")
    layouts = [PageLayout(Precision.parse(name), 32, 256) for name in TIERS[:tiers]]
    memory = PagedMemory(
        layouts, pages=pages, layers=2, kv_heads=1, max_requests=requests, max_tokens=_LONGEST, watermark=0.0,
        device=device, pool=False,
    )  # fmt: skip
    walker = _Walker(memory, random.Random(seed))
    for _ in range(operations):
        walker.operate()
        walker.compare()
    return Walk(
        dict(walker.done), walker.refused, walker.lost_or_shared, walker.misplaced,
        walker.oracle.recycled / pages, walker.exhausted,
    )  # fmt: skip


def faulty_pages(memory: PagedMemory) -> int:
    """Pages of the pool that are not in exactly one place, a table or the free list; waits for the device."""
    head, _, count = memory.ring.tolist()
    pages = memory.free.numel()
    listed = memory.free.cpu()[(head + torch.arange(count)) % pages]
    tables = memory.tables.cpu()
    seen = torch.cat([tables[tables >= 0], listed[listed >= 0]]).long()
    return int((torch.bincount(seen, minlength=pages) != 1).sum())


def share_out(tokens: Sequence[int], heads: tuple[int, int], tiers: int, generator: torch.Generator) -> Tensor:
    """Lengths int32 [n, layers, kv_heads, tiers] of prompts, at random; what is left of ``tokens`` is pruned."""
    shares = torch.rand(len(tokens), *heads, tiers + 1, generator=generator) ** 3 + 1e-6
    shares = shares / shares.sum(dim=-1, keepdim=True)
    limits = torch.tensor(tokens)[:, None, None, None]
    return (shares[..., :tiers] * limits).floor().to(torch.int32)


class _Walker:
    """Both managers, and what the walk has counted."""

    def __init__(self, memory: PagedMemory, choose: random.Random) -> None:
        _, requests, layers, kv_heads, entries = memory.tables.shape
        self.memory, self.choose = memory, choose
        self.oracle = OracleManager(
            [layout.tokens for layout in memory.layouts], pages=memory.free.numel(), layers=layers, kv_heads=kv_heads,
            entries=entries, spare=memory.spare,
        )  # fmt: skip
        self.prompts: dict[int, int] = {}
        self.sequence: dict[int, int] = {}  # tokens so far, pruned ones too
        self.empty = set(range(requests))
        self.done: Counter[str] = Counter()
        self.refused = self.lost_or_shared = self.misplaced = self.exhausted = 0

    def operate(self) -> None:
        """One operation that can be tried now."""
        growing = [slot for slot in sorted(self.oracle.compacted) if self.sequence[slot] < _LONGEST]
        waiting = sorted(set(self.prompts) - self.oracle.compacted)
        able = [(self.admit, self.empty, 1), (self.compact, waiting, 2), (self.step, growing, 5)]
        able = [one for one in [*able, (self.release, self.prompts, 1)] if one[1]]
        weights = [weight for *_, weight in able]
        operation, slots, _ = self.choose.choices(able, weights)[0]
        some = self.choose.sample(sorted(slots), self.choose.randint(1, len(slots)))
        if operation(some):
            self.done[operation.__name__] += 1
        else:
            self.refused += 1

    def admit(self, slots: list[int]) -> bool:
        """Prompts of any length; False where they do not fit."""
        tokens = [self.choose.randint(1, _LONGEST) for _ in slots]
        if not self.memory.can_admit(tokens):
            return False
        self.memory.admit(slots, tokens)
        for slot, count in zip(slots, tokens, strict=True):
            self.oracle.admit(slot, count)
            self.prompts[slot] = self.sequence[slot] = count
            self.empty.discard(slot)
        return True

    def compact(self, slots: list[int]) -> bool:
        """Any plan that the prompts allow; of four, one keeps every token in the first tier."""
        tokens = [self.prompts[slot] for slot in slots]
        *_, layers, kv_heads, tiers = self.memory.lengths.shape
        generator = torch.Generator().manual_seed(self.choose.getrandbits(32))
        plan = share_out(tokens, (layers, kv_heads), tiers, generator)
        if self.choose.random() < 0.25:
            plan.zero_()
            plan[..., 0] = torch.tensor(tokens)[:, None, None]
        self.memory.compact(slots, plan.to(self.memory.device))
        for k, slot in enumerate(slots):
            self.oracle.compact(slot, {head: plan[k, head[1], head[2]].tolist() for head in self.oracle.heads(slot)})
        return True

    def step(self, slots: list[int]) -> bool:
        """Pages for one more token, then the token; False where the pool has too few."""
        active = torch.zeros(self.memory.max_requests, dtype=torch.bool)
        active[slots] = True
        self.memory.reserve_step(active.to(self.memory.device))
        if not self.oracle.step(slots):
            self.memory.status.zero_()
            return False
        for slot in slots:
            self.sequence[slot] += 1
            for head in self.oracle.heads(slot):
                tier = self.choose.randrange(-1, len(self.memory.layouts))
                if tier >= 0:  # what the kernel that writes the token would do
                    self.oracle.append(head, tier)
                    self.memory.lengths[(*head, tier)] += 1
        return True

    def release(self, slots: list[int]) -> bool:
        """All pages of some requests."""
        self.memory.release(slots)
        for slot in slots:
            self.oracle.release(slot)
            del self.prompts[slot], self.sequence[slot]
            self.empty.add(slot)
        return True

    def compare(self) -> None:
        """Count what is wrong now."""
        memory, oracle = self.memory, self.oracle
        self.lost_or_shared = max(self.lost_or_shared, faulty_pages(memory))
        head, tail, count = memory.ring.tolist()
        self.exhausted += count == 0
        listed = memory.free.tolist()
        queue = [listed[(head + i) % oracle.pages] for i in range(count)]
        ends = [oracle.taken % oracle.pages, oracle.recycled % oracle.pages, len(oracle.queue)]
        wrong = _differing([*queue, head, tail, count], [*oracle.queue, *ends])
        for table, requests in enumerate(memory.tables.tolist()):
            for slot in range(memory.max_requests):
                for place in oracle.heads(slot):
                    wrong += _differing(requests[slot][place[1]][place[2]], oracle.row(place, table))
        self.misplaced = max(self.misplaced, wrong)


def _differing(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(left, right, strict=False)) + abs(len(left) - len(right))
