"""Figure 6 on the live memory manager, step by step, and a look at the pages of any request."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import PagedMemory

HEADS = ("A", "B")


@dataclass(frozen=True)
class Snapshot:
    """The manager after one step: what it did, the list in memory and in order, its ends, and the request's tables.

    ``slots`` are page ids as they lie in the circular list, None where nothing is free; ``free`` the same from head to
    tail. ``tables`` has one row a head of the request, -1 where no page is.
    """

    title: str
    slots: tuple[int | None, ...]
    free: tuple[int, ...]
    head: int
    tail: int
    tables: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, title: str, memory: PagedMemory, slot: int) -> "Snapshot":
        """Of ``memory`` now, with the tables of the request in ``slot``."""
        head, tail, count = memory.ring.tolist()
        listed, pages = memory.free.tolist(), memory.free.numel()
        order = [(head + i) % pages for i in range(count)]
        filled = set(order)
        return cls(
            title=title,
            slots=tuple(page if i in filled else None for i, page in enumerate(listed)),
            free=tuple(listed[i] for i in order),
            head=head,
            tail=tail,
            tables=tuple(map(tuple, memory.tables[0, slot].flatten(0, 1).tolist())),
        )


def figure_6(device: torch.device | str = "cpu") -> tuple[PagedMemory, int, list[Snapshot]]:
    """Figure 6 as it happens: the memory, the slot of the request with heads A and B, and each step.

    Two tokens per high page and four per low page, a prompt of eight tokens. Of the thirteen pages, 0 to 4 belong to
    an earlier request, so that the numbers are the figure's: 5-8 are allocated to A and 9-12 to B; A keeps 5 (high) and
    8 (low), B keeps 9, 10 (high) and 12 (low); 6, 7 and 11 go back, and the tail wraps to the start of the list.
    """
    layouts = [PageLayout(Precision.parse(name), head_dim=128, page_bytes=640) for name in ("K8V4", "K4V2")]
    # The figure allocates ceil(8 / 2) pages. One more is needed where seven tokens are high and one is low.
    memory = PagedMemory(
        layouts, pages=13, layers=1, kv_heads=2, max_requests=2, max_tokens=12, spare=0, device=device
    )  # fmt: skip

    def lengths(*heads: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[heads]], dtype=torch.int32, device=device)

    earlier, slot = 0, 1
    memory.admit([earlier], [4])
    memory.compact([earlier], lengths((2, 1), (1, 3)))
    memory.reserve_step(torch.tensor([True, False], device=device))  # only the full high page of head A wants another
    steps = [Snapshot.of("An earlier request holds pages 0 to 4", memory, slot)]
    memory.admit([slot], [8])
    steps.append(Snapshot.of("Allocate for eight high tokens a head", memory, slot))
    memory.compact([slot], lengths((2, 4), (4, 3)))
    steps.append(Snapshot.of("Keep what the plan needs, give back the rest, low pages to the right end", memory, slot))
    return memory, slot, steps


def inspect_pages(memory: PagedMemory, slot: int) -> pd.DataFrame:
    """The pages of the request in ``slot``, one a row.

    Columns: layer, head, tier, table, entry, page, tokens, capacity, fill (percent of its tokens). Waits for the
    device. Raises ValueError for a slot that does not exist.
    """
    if not 0 <= slot < memory.max_requests:
        raise ValueError(f"slot {slot} does not exist; slots are 0 to {memory.max_requests - 1}")
    tables, counts = memory.tables[:, slot].cpu(), memory.page_counts[slot].tolist()
    lengths, entries = memory.lengths[slot].tolist(), memory.tables.shape[-1]
    rows = []
    for layer, heads in enumerate(counts):
        for head, held in enumerate(heads):
            for tier, layout in enumerate(memory.layouts):
                for j in range(held[tier]):
                    entry = entries - 1 - j if tier % 2 else j
                    tokens = min(layout.tokens, max(0, lengths[layer][head][tier] - j * layout.tokens))
                    page = int(tables[tier // 2, layer, head, entry])
                    fill = 100 * tokens / layout.tokens
                    rows.append((layer, head, tier, tier // 2, entry, page, tokens, layout.tokens, fill))
    names = ["layer", "head", "tier", "table", "entry", "page", "tokens", "capacity", "fill"]
    return pd.DataFrame(rows, columns=names)
