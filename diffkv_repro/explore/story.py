"""``Story``: requests that come, are compacted, generate and go, to be stopped at any moment."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.memory_walk import share_out
from diffkv_repro.explore.effect import Effect

_TIERS = ("K8V4", "K4V2")
_SMALL_PAGES = [128 * k for k in range(7, 28)]  # bytes: so that a prompt of a hundred tokens fills several


@dataclass(frozen=True)
class Story:
    """``prompts`` tokens of requests, which come one after another, generate ``generated`` tokens together, and go.

    How many tokens of each head go to which tier is drawn at random by ``seed``, or is that of ``plan`` int32
    [requests, layers, kv_heads, 2]. A generated token goes to the first tier, the second, or nowhere, with the odds
    that a head's prompt had.
    """

    prompts: tuple[int, ...] = (96, 160, 131)
    layers: int = 4
    kv_heads: int = 4
    generated: int = 24
    seed: int = 0
    tiers: tuple[str, ...] = _TIERS
    head_dim: int = 128
    plan: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", tuple(self.prompts))
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError(f"prompts is {self.prompts}; at least one request of at least one token is needed")
        for name, least in (("layers", 1), ("kv_heads", 1), ("generated", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        shape = (len(self.prompts), self.layers, self.kv_heads, len(self.tiers))
        if self.plan is not None and tuple(self.plan.shape) != shape:
            raise ValueError(
                f"plan is {list(self.plan.shape)}; it must be {list(shape)}: requests, layers, heads, tiers"
            )

    @classmethod
    def of(cls, effect: Effect, *, generated: int = 24, seed: int = 0) -> "Story":
        """The story of one request: the prompt of ``effect``, its tokens in the tiers that its policy says."""
        layers, kv_heads, tokens = effect.tiers.shape
        counts = torch.stack([(effect.tiers == index).sum(dim=-1) for index in range(len(effect.names))], dim=-1)
        return cls(
            (tokens,), layers, kv_heads, generated, seed, effect.names, effect.statistics.loaded.layout.head_dim,
            counts[None].to(torch.int32),
        )  # fmt: skip

    @property
    def moments(self) -> list[str]:
        """What has just happened at each moment."""
        found = ["nothing yet: all pages are free"]
        for request, tokens in enumerate(self.prompts):
            found.append(f"request {request} comes: pages for {tokens} tokens, as if all were in the first tier")
            found.append(f"request {request} is compacted: it keeps what its tiers need, the others go back")
        found += [f"generation, token {step}: a page for each tier whose last one is full" for step in self._steps]
        return found + [f"request {request} goes: all its pages go back" for request in range(len(self.prompts))]

    def at(self, moment: int) -> PagedMemory:
        """The memory at ``moment``, an index into :attr:`moments`, played from the start."""
        if not 0 <= moment < len(self.moments):
            raise ValueError(f"moment is {moment}; allowed are 0 to {len(self.moments) - 1}")
        memory = self._memory()
        for event in self._events()[:moment]:
            event(memory)
        return memory

    @property
    def _steps(self) -> range:
        return range(1, self.generated + 1)

    def _memory(self) -> PagedMemory:
        precisions = [Precision.parse(name) for name in self.tiers]
        size = search_page_bytes(precisions, self.head_dim, _SMALL_PAGES)
        layouts = [PageLayout(precision, self.head_dim, size) for precision in precisions]
        longest = max(self.prompts) + self.generated
        fewest = min(layout.tokens for layout in layouts)
        # Room for all prompts as they come, and for what generation adds.
        held = sum(-(-tokens // fewest) + len(layouts) for tokens in self.prompts)
        held += len(self.prompts) * (-(-self.generated // fewest) + len(layouts))
        return PagedMemory(
            layouts, pages=held * self.layers * self.kv_heads, layers=self.layers, kv_heads=self.kv_heads,
            max_requests=len(self.prompts), max_tokens=longest, watermark=0.0, pool=False,
        )  # fmt: skip

    def _events(self) -> list[Callable[[PagedMemory], None]]:
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.layers, self.kv_heads)
        drawn = share_out(self.prompts, heads, len(self.tiers), generator)
        plan = drawn if self.plan is None else self.plan
        events: list[Callable[[PagedMemory], None]] = []
        for slot, tokens in enumerate(self.prompts):
            events.append(lambda memory, slot=slot, tokens=tokens: memory.admit([slot], [tokens]))
            events.append(lambda memory, slot=slot: memory.compact([slot], plan[slot : slot + 1].contiguous()))
        odds = plan.cumsum(dim=-1) / torch.tensor(self.prompts)[:, None, None, None]
        for _ in self._steps:
            chosen = torch.rand(len(self.prompts), *heads, generator=generator)[..., None]
            first = torch.searchsorted(odds.contiguous(), chosen).squeeze(-1)  # beyond the last tier: pruned
            events.append(lambda memory, tier=first: _grow(memory, tier))
        for slot in range(len(self.prompts)):
            events.append(lambda memory, slot=slot: memory.release([slot]))
        return events


def _grow(memory: PagedMemory, tier: torch.Tensor) -> None:
    """A token for every head of all requests, into ``tier`` [requests, layers, kv_heads], where there is such a one."""
    memory.reserve_step(torch.ones(memory.max_requests, dtype=torch.bool))
    tiers = memory.lengths.shape[-1]
    kept = tier < tiers
    added = torch.nn.functional.one_hot(tier.clamp_max(tiers - 1), tiers) * kept[..., None]
    memory.lengths += added.to(memory.lengths.dtype)
