"""``PagedMemory``: pages of all layers, heads, requests and tiers from one pool, managed on the device (section 5.2).

Differences from the official code: head, tail and count of the free list live on the device, so that a generation step
needs no copy to the host and can be captured in a CUDA graph; the count tells an empty list from a full one; a prompt
is planned before its codes are written (the official code compresses into the conservative allocation and frees
afterwards), so compaction moves page ids and never what is in the pages.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.diffkv import manager_reference
from diffkv_repro.diffkv.free_bound import FreeBound
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory_checks import (
    check_integer,
    check_lengths,
    check_slots,
    checked_integers,
    checked_layouts,
)
from diffkv_repro.kernels.manager_state import BAD_LENGTHS, OUT_OF_PAGES, TABLE_FULL, ManagerState

_INT32 = 2**31 - 1


class OutOfPages(RuntimeError):
    """Too few free pages: ``needed`` are asked for, ``free`` are there, ``watermark`` of them are kept back."""

    def __init__(self, needed: int, free: int, watermark: int) -> None:
        super().__init__(
            f"{needed} pages are needed and {free} are free, of which {watermark} are kept back as the watermark"
        )
        self.needed, self.free, self.watermark = needed, free, watermark


class PagedMemory:
    """A page pool, its circular free list and bidirectional page tables for ``max_requests`` request slots.

    One layout a tier, most precise first, all of one head_dim and page size. Tiers 2k and 2k + 1 share table k: the
    first from the left going right, the second from the right end going left (page j at entries - 1 - j); unused
    entries are -1. Token i of a tier lies in the tier's page i // layout.tokens, slot i % layout.tokens.

    ``watermark`` is the share of the pages that admission leaves free; ``spare`` the pages that a head takes for its
    prompt beyond ceil(tokens / tokens per page), by default one a further tier: tokens spread over tiers can leave
    the last page of each partly empty. (Figure 6 draws none; then a split may not fit, which ``compact`` refuses.)
    ``kernels`` is ``triton``, ``torch``, or by default triton on CUDA devices and torch elsewhere. Without ``pool`` the
    pages themselves are left out, for measuring the manager alone.

    All tensors stay where they are for good. ``entries`` of a table: ceil(max_tokens / t) + tiers - 1, with t the
    fewest tokens per page. It holds every split: before the last token, n = max_tokens - 1 tokens lie in the tiers,
    and with the page each tier may hold open for the next one they take sum(n_i // t_i + 1) <= n // t + tiers pages.

    Raises ValueError for sizes that make no sense, naming them.
    """

    def __init__(
        self, layouts: Sequence[PageLayout], *, pages: int, layers: int, kv_heads: int, max_requests: int,
        max_tokens: int, device: torch.device | str = "cpu", watermark: float = 0.01, spare: int | None = None,
        kernels: Literal["auto", "triton", "torch"] = "auto", pool: bool = True,
    ) -> None:  # fmt: skip
        self.layouts = checked_layouts(layouts)
        sizes = {"pages": pages, "layers": layers, "kv_heads": kv_heads, "max_requests": max_requests}
        for name, size in (sizes | {"max_tokens": max_tokens}).items():
            check_integer(name, size, 1, 2**30)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark}; it is a share of the pages, from 0 and below 1")
        tiers = len(self.layouts)
        self.spare = tiers - 1 if spare is None else spare
        check_integer("spare", self.spare, 0, tiers - 1)
        self.max_requests, self.max_tokens, self.watermark = max_requests, max_tokens, int(pages * watermark)
        self._tier_tokens = tuple(layout.tokens for layout in self.layouts)
        entries = -(-max_tokens // min(self._tier_tokens)) + tiers - 1
        if max_requests * layers * kv_heads * tiers > _INT32:
            raise ValueError(
                f"{max_requests} requests x {layers} layers x {kv_heads} heads x {tiers} tiers exceed int32"
            )
        self.device = torch.device(device)
        self._run = _operations(kernels, self.device)
        self.state = ManagerState.new(
            tier_tokens=self._tier_tokens, pages=pages, layers=layers, kv_heads=kv_heads, max_requests=max_requests,
            entries=entries, device=self.device,
        )  # fmt: skip
        self.pool = torch.zeros(pages if pool else 0, self.layouts[0].page_bytes, dtype=torch.uint8, device=self.device)
        self.free, self.ring, self.status = self.state.free, self.state.ring, self.state.status
        self.tables, self.lengths, self.page_counts = self.state.tables, self.state.lengths, self.state.page_counts
        self._bound = FreeBound(pages, self.state.heads, self._tier_tokens)
        self._prompts: dict[int, int] = {}  # tokens of admitted prompts by slot
        self._compacted: set[int] = set()

    @property
    def free_bound(self) -> int:
        """Pages that are free at least, as far as the host knows without asking the device."""
        return self._bound.free()

    def prompt_pages(self, tokens: int) -> int:
        """Pages of a head for a prompt of ``tokens``: all in the smallest pages, and ``spare`` (section 5.2)."""
        check_integer("tokens", tokens, 1, self.max_tokens)
        return -(-tokens // min(self._tier_tokens)) + self.spare

    def can_admit(self, tokens: Sequence[int]) -> bool:
        """Whether prompts of these lengths find pages above the watermark and request slots.

        Asks the device for its count, which waits for it, only where the host's bound would say no.
        """
        needed = self.state.heads * sum(map(self.prompt_pages, tokens))
        slots = len(tokens) <= self.max_requests - len(self._prompts)
        return slots and needed + self.watermark <= self._free_for(needed)

    def admit(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Conservative allocation for the prompts of ``tokens`` tokens in empty ``slots``.

        Every head of every layer takes :meth:`prompt_pages`, laid from the left into table 0, in the order request,
        layer, head. Raises :class:`OutOfPages`, and ValueError for slots in use, before anything is written.
        """
        slots, tokens = checked_integers("slots", slots), checked_integers("tokens", tokens)
        if len(slots) != len(tokens):
            raise ValueError(f"{len(slots)} slots and {len(tokens)} prompt lengths; there is one for each")
        self._check_slots(slots, wanted="empty")
        held = [self.prompt_pages(count) for count in tokens]
        needed = self.state.heads * sum(held)
        if needed + self.watermark > (free := self._free_for(needed)):
            raise OutOfPages(needed, free, self.watermark)
        if not slots:
            return
        starts = [self.state.heads * sum(held[:k]) for k in range(len(held))]
        self._run.admit(self.state, self._on_device([*slots, *starts, *held, needed]))
        for slot, count, pages in zip(slots, tokens, held, strict=True):
            self._prompts[slot] = count
            self._bound.admit(slot, self.state.heads * pages)

    def compact(self, slots: Sequence[int], lengths: Tensor, *, validate: bool = True) -> None:
        """Keep the pages that ``lengths`` int32 [n, layers, kv_heads, tiers] tokens need, give back the others.

        Of a head's pages as they were allocated, tier 0 keeps the leftmost; tier 1 the rightmost, its page 0 the last
        one, and they move to the table's right end; of those between, tiers 2 and 3 likewise. The middle goes back in
        order, into a slice of the list that is the head's own (Figure 6). Codes are written after this.
        Raises ValueError for lengths that are negative, exceed the prompt or do not fit, which reads them back from
        the device; without ``validate`` such lengths set ``status`` instead, and nothing else changes.
        """
        slots = checked_integers("slots", slots)
        self._check_slots(slots, wanted="admitted")
        shape = (len(slots), *self.lengths.shape[1:])
        if lengths.dtype != torch.int32 or tuple(lengths.shape) != shape or lengths.device != self.lengths.device:
            raise ValueError(
                f"lengths are {lengths.dtype} {list(lengths.shape)} on {lengths.device}; they must be int32 "
                f"{list(shape)} (slots, layers, KV heads, tiers) on {self.lengths.device}"
            )
        if not slots:
            return
        if validate:
            prompts = [self._prompts[slot] for slot in slots]
            check_lengths(lengths, prompts, list(map(self.prompt_pages, prompts)), self.state.tier_tokens)
        self._run.compact(self.state, self._on_device(slots), lengths.contiguous())
        for slot in slots:
            self._compacted.add(slot)
            self._bound.compact(slot)

    def reserve_step(self, active: Tensor) -> None:
        """Generation phase: one page for every tier whose last page is full, so that each can receive a token.

        ``active`` bool, int8 or uint8 [max_requests] on the device; slots that hold no compacted request take nothing.
        :meth:`can_step` must have been true; if pages run out all the same, or a table is full, nothing is written but
        ``status``. Nothing here waits for the device, so that a CUDA graph can capture it, after a first call that
        compiles; ``active`` is then read at its place at each replay.
        """
        if active.dtype not in (torch.bool, torch.int8, torch.uint8) or tuple(active.shape) != (self.max_requests,):
            raise ValueError(
                f"active is {active.dtype} {list(active.shape)}; it must be bool, int8 or uint8 [{self.max_requests}]"
            )
        if active.device != self.lengths.device or not active.is_contiguous():
            raise ValueError(f"active must be contiguous and on {self.lengths.device}; it is on {active.device}")
        self._run.reserve_step(self.state, active.view(torch.uint8))
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.count_steps(1)

    def can_step(self, n_steps: int = 1) -> bool:
        """Whether ``n_steps`` steps find their pages whatever the heads need; never asks the device.

        After False, :meth:`synchronize_counts` may know better.
        """
        check_integer("n_steps", n_steps, 0, _INT32)
        return self._bound.free(n_steps) >= 0

    def count_steps(self, n_steps: int = 1) -> None:
        """Tell the host of steps that a CUDA graph replayed; :meth:`reserve_step` counts its own."""
        check_integer("n_steps", n_steps, 0, _INT32)
        self._bound.step(n_steps)

    def release(self, slots: Sequence[int]) -> None:
        """All pages of ``slots`` back to the list, by request, layer, head, tier; the slots are empty again."""
        slots = checked_integers("slots", slots)
        self._check_slots(slots, wanted="in use")
        if not slots:
            return
        self._run.release(self.state, self._on_device(slots))
        self._bound.release(slots)
        for slot in slots:
            del self._prompts[slot]
            self._compacted.discard(slot)

    def synchronize_counts(self) -> int:
        """Read the number of free pages from the device, which waits for it; the host's bound is exact again.

        Raises RuntimeError, once, where an operation on the device had to be left undone since the last call.
        """
        *_, count, status = torch.cat([self.ring, self.status]).tolist()
        self._bound.refresh(count)
        if status:
            self.status.zero_()
            reasons = {
                OUT_OF_PAGES: "pages ran out",
                TABLE_FULL: f"a page table was full (max_tokens is {self.max_tokens})",
                BAD_LENGTHS: "lengths did not fit the pages of their prompt",
            }
            undone = " and ".join(reason for bit, reason in reasons.items() if status & bit)
            raise RuntimeError(f"an operation on the device was left undone: {undone}")
        return count

    def pages_in_use(self) -> int:
        """Pages that are not free, by the device's count, which waits for it."""
        return len(self.free) - self.synchronize_counts()

    def kv_bytes(self, slots: Sequence[int] | None = None, *, tokens: Sequence[int] | None = None) -> KVBytes:
        """Bytes of requests, by default all: their pages, and their share of tables and counts; waits for the device.

        ``tokens`` are the sequence lengths, for ``full``; without them a ratio cannot be told.
        """
        slots = sorted(self._prompts) if slots is None else checked_integers("slots", slots)
        self._check_slots(slots, wanted="in use")
        if tokens is not None and len(tokens) != len(slots):
            raise ValueError(f"{len(slots)} slots and {len(tokens)} sequence lengths; there is one for each")
        stored = self.lengths[slots].sum(dim=(0, 1, 2)).tolist()
        held = int(self.page_counts[slots].sum()) * self.layouts[0].page_bytes
        by_tier = list(zip(self.layouts, stored, strict=True))
        share = (self.tables.nbytes + self.lengths.nbytes + self.page_counts.nbytes) // self.max_requests
        return KVBytes(
            payload=sum(count * (layout.key_row_bytes + layout.value_row_bytes) for layout, count in by_tier),
            scales=sum(count * layout.precision.metadata_bytes() for layout, count in by_tier),
            scores=4 * sum(stored),
            positions=4 * sum(stored),
            tables=share * len(slots),
            padding=held - sum(count * layout.token_bytes for layout, count in by_tier),
            full=4 * self.layouts[0].head_dim * self.state.heads * sum(tokens or ()),
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors: pool, free list, tables, counts and what the kernels pass on to each other."""
        return self.pool.nbytes + self.state.nbytes

    def _free_for(self, needed: int) -> int:
        free = self._bound.free()
        return free if needed + self.watermark <= free else self.synchronize_counts()

    def _on_device(self, values: list[int]) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(self.device, non_blocking=True)

    def _check_slots(self, slots: list[int], wanted: Literal["empty", "admitted", "in use"]) -> None:
        check_slots(
            slots, wanted, max_requests=self.max_requests, prompts=self._prompts, compacted=self._compacted
        )  # fmt: skip


def _operations(kernels: str, device: torch.device) -> ModuleType:
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"kernels is {kernels!r}; allowed are auto, triton and torch")
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return manager_reference
    from diffkv_repro.kernels import manager_launch  # triton, which only Linux has

    return manager_launch
