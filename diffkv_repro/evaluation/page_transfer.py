"""DiffKV's pages on the way from one worker to another (ours): what arrives, in how many bytes, what is refused."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffkv_repro.diffkv import paged_ops
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.page_rows import SCORES, take_rows
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.codecs import NoCodec
from diffkv_repro.kvserve.diffkv_pages import TokenTiers, receive_pages, send_pages, store_prompt, view_of
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.measure import Turn
from diffkv_repro.kvserve.profile import Profile

_SLOT = 0


@dataclass(frozen=True)
class PageTransfer:
    """Two workers of one model: ``sender``'s pages hold a prompt of ``tokens``, ``receiver``'s are empty.

    An arm for :func:`~diffkv_repro.kvserve.measure.measure_all`: encoding is what turns pages into the bytes of a
    frame, decoding what puts a frame's bytes into the receiver's pages. ``receiver`` may have pages of another size.
    """

    profile: Profile
    layout: KVLayout
    tokens: int
    sender: PagedMemory
    receiver: PagedMemory

    @classmethod
    def of(
        cls, kv: KV, layout: KVLayout, profile: Profile, assets: Assets, *, page_bytes: int | None = None,
        seed: int = 0,
    ) -> "PageTransfer":  # fmt: skip
        """Compress ``kv`` into the sender's pages; the receiver's are of ``page_bytes`` (default: the same), its free
        list is in another order, and all pages are full of another request's bytes, which must not show."""
        sender = _memory(profile.quantizer, layout, kv.tokens, None, seed)
        receiver = _memory(profile.quantizer, layout, kv.tokens, page_bytes, seed + 1)
        store_prompt(sender, _SLOT, kv, profile, layout, assets)
        return cls(profile, layout, kv.tokens, sender, receiver)

    def send(self) -> Frame:
        """The frame of the sender's pages."""
        return send_pages(self.sender, _SLOT, self.tokens, self.profile, self.layout)

    def receive(self, data: bytes) -> Frame:
        """Put the bytes of a frame into the receiver's pages, and say which frame it was."""
        frame = Frame.from_bytes(data, self.layout)
        receive_pages(frame, self.receiver, _SLOT)
        return frame

    def turn(self) -> Turn:
        """There and once; the receiver's pages are free again afterwards."""
        started = time.perf_counter()
        data = self.send().to_bytes()
        between = time.perf_counter()
        frame = self.receive(data)
        ended = time.perf_counter()
        self.receiver.release([_SLOT])
        return Turn(between - started, ended - between, data, frame)

    def share_of_equal_layers(self, group: int, *, seed: int = 0) -> float:
        """Send, then attend with random queries on both sides: the share of layers in which the outputs, and the
        running scores afterwards, are equal in every bit. ``group`` query heads share a KV head."""
        self.receive(self.send().to_bytes())
        generator = torch.Generator().manual_seed(seed)
        shape = (1, group * self.layout.kv_heads, self.layout.head_dim)
        equal = 0
        for layer in range(self.layout.layers):
            query = torch.randn(shape, generator=generator)
            both = [_attended(memory, layer, query) for memory in (self.sender, self.receiver)]
            equal += all(torch.equal(mine, its) for mine, its in zip(*both, strict=True))
        self.receiver.release([_SLOT])
        return equal / self.layout.layers

    def uncounted_bytes(self) -> int:
        """Bytes sent without a codec, minus those that the account of the pages and the framing add up to.

        The account is ``PagedMemory.kv_bytes``: codes, scales, scores, positions; padding and page tables stay behind.
        Framing is the header, and of each layer 24 bytes of its section, 2 of powers, the lengths, and 4 for each
        stream that is not empty.
        """
        frame = replace(self, profile=replace(self.profile, codec=NoCodec())).send()
        account, pages = self.sender.kv_bytes([_SLOT]), self.sender.layouts
        held = self.sender.lengths[_SLOT].sum(dim=1) > 0
        streams = torch.tensor([4 + (page.key_groups > 0) + (page.value_groups > 0) for page in pages])
        framing = len(frame.header.packed) + 4 * int((held.cpu() * streams).sum())
        framing += self.layout.layers * (24 + 2 + 4 * self.layout.kv_heads * len(pages))
        counted = account.payload + account.scales + account.scores + account.positions
        return len(frame.to_bytes()) - counted - framing


def _attended(memory: PagedMemory, layer: int, query: Tensor) -> list[Tensor]:
    """The output, and the scores of all tokens after it."""
    view, row = view_of(memory), torch.tensor([_SLOT], dtype=torch.int32, device=memory.device)
    options = {"layer": layer, "requests": row, "scale": query.shape[-1] ** -0.5}
    output = paged_ops.decode_attention(view, query.to(memory.device), **options)
    return [output, *(take_rows(view, _SLOT, [layer], tier)[SCORES] for tier in range(len(memory.layouts)))]


def share_refused(transfer: PageTransfer, trials: int, *, seed: int = 0) -> float:
    """Share of damaged and foreign frames that are refused with every page of the receiver still free.

    One bit is wrong somewhere, the end is missing, bytes follow, or the frame is of another model.
    """
    dice, whole = random.Random(seed), transfer.send().to_bytes()
    foreign = KVLayout(**(vars(transfer.layout) | {"model": "another model"}))
    ways: list[Callable[[], tuple[bytes, KVLayout]]] = [
        lambda: (_flipped(whole, dice), transfer.layout),
        lambda: (whole[: dice.randrange(len(whole))], transfer.layout),
        lambda: (whole + bytes(dice.randint(1, 9)), transfer.layout),
        lambda: (whole, foreign),
    ]
    refused = 0
    for trial in range(trials):
        data, layout = ways[trial % len(ways)]()
        try:
            receive_pages(Frame.from_bytes(data, layout), transfer.receiver, _SLOT)
        except FrameError:
            refused += transfer.receiver.synchronize_counts() == len(transfer.receiver.free)
        else:
            transfer.receiver.release([_SLOT])
    return refused / trials


def _flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _memory(quantizer: TokenTiers, layout: KVLayout, tokens: int, page_bytes: int | None, seed: int) -> PagedMemory:
    pages = quantizer.layouts(layout.head_dim, page_bytes)
    heads = layout.layers * layout.kv_heads
    needed = -(-tokens // min(page.tokens for page in pages)) + len(pages) - 1
    memory = PagedMemory(
        pages, pages=heads * needed, layers=layout.layers, kv_heads=layout.kv_heads, max_requests=2,
        max_tokens=tokens + 1, watermark=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    memory.free.copy_(memory.free[torch.randperm(len(memory.free), generator=generator)])
    memory.pool.random_(0, 256, generator=generator)
    return memory
