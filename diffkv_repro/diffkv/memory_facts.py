"""What Figure 6 and section 5 state of pages, tables and the free list, taken from the live manager and its layouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout, table_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.memory_example import Snapshot

SEARCHED = ("K8V4:1/2", "K8V4", "K4V2:2/4", "K4V2")
"""What the released code searches a page size for."""
_MIB = 2**20


def pages_as_drawn(allocated: Snapshot, compacted: Snapshot, example: Mapping[str, Any]) -> int:
    """How many pages of Figure 6 are allocated to the head and then kept in the tier, or released, as ``example`` says.

    ``example`` is the figure's entry in ``claims.yaml``. High pages stand left in a table, low pages at its right end.
    """
    right = 0
    for row, (name, drawn) in enumerate(example["allocated"].items()):
        kept = compacted.tables[row]
        high = kept[: kept.index(-1)]
        low = [page for page in kept[len(high) :] if page >= 0]
        for page in drawn:
            wanted = (
                page in example["kept_high"][name],
                page in example["kept_low"][name],
                page in example["released"],
            )
            found = (page in high, page in low, page in compacted.free)
            right += page in allocated.tables[row] and found == wanted
    return right


def end_wrapped(before: Snapshot, after: Snapshot) -> bool:
    """Whether the last free page lay further back in the list before than after: the end went round to the front."""
    last = [(shot.tail - 1) % len(shot.slots) for shot in (before, after)]
    return all(shot.slots[at] is not None for shot, at in zip((before, after), last, strict=True)) and last[1] < last[0]


def parse_setting(name: str) -> Precision:
    """``K4V2``, or ``K4V2_groups_2_4`` as ``claims.yaml`` writes it."""
    precision, _, groups = name.partition("_groups_")
    return Precision.parse(f"{precision}:{groups.replace('_', '/')}" if groups else precision)


def page_table(settings: Mapping[str, int], head_dim: int, page_bytes: int) -> pd.DataFrame:
    """Tokens of a page for each setting, beside what the released code holds; where its segments start."""
    rows = {}
    for name, released in settings.items():
        precision = parse_setting(name)
        layout = PageLayout(precision, head_dim, page_bytes)
        keys = ("key scales", "values", "value scales", "scores", "positions")
        rows[str(precision)] = {
            "tokens a page": layout.tokens, "released code": released, "bytes a token": layout.token_bytes,
            "unused %": 100 * layout.slack_bytes / page_bytes,
        } | dict(zip((f"{key} at" for key in keys), layout.offsets[1:], strict=True))  # fmt: skip
    return pd.DataFrame(rows).T.astype({"tokens a page": int, "released code": int})


def slack_curve(precisions: Sequence[str], head_dim: int, sizes: Sequence[int]) -> pd.DataFrame:
    """Percent of a page that holds nothing, by page size (index) and precision; ``worst`` is their largest.

    Sizes that cannot be a page, or hold no token of one of the precisions, are left out.
    """
    rows = {}
    for size in sizes:
        try:
            layouts = [PageLayout(Precision.parse(name), head_dim, size) for name in precisions]
        except ValueError:
            continue
        rows[size] = {name: 100 * one.slack_bytes / size for name, one in zip(precisions, layouts, strict=True)}
    table = pd.DataFrame(rows).T
    return table.assign(worst=table.max(axis=1))


def table_mib(case: Mapping[str, int], tokens_per_page: int, spare_entries: int = 0) -> float:
    """MiB of the page tables of ``case`` (layers, kv_heads, requests, tokens), ``spare_entries`` more a head."""
    sizes = {name: case[name] for name in ("layers", "kv_heads", "requests")}
    entries = -(-case["tokens"] // tokens_per_page) + spare_entries
    return table_bytes(**sizes, tokens=entries, tokens_per_page=1) / _MIB


def pages_for_one_token(device: torch.device | str = "cpu") -> int:
    """Pages that one head takes in one step when its last high and its last low page are both full."""
    memory = _one_head(device)
    memory.admit([0], [memory.max_tokens])
    full = torch.tensor([[[[layout.tokens for layout in memory.layouts]]]], dtype=torch.int32, device=device)
    memory.compact([0], full)
    before = memory.synchronize_counts()
    memory.reserve_step(torch.ones(1, dtype=torch.bool, device=device))
    return before - memory.synchronize_counts()


def free_by_positions(device: torch.device | str = "cpu") -> tuple[list[int], list[int]]:
    """Free pages of an untouched and of an exhausted list: from head and tail alone, and by the manager's own count."""
    memory, positions, counted = _one_head(device), [], []
    for tokens in (None, memory.max_tokens):  # a prompt of so many tokens takes every page
        if tokens:
            memory.admit([0], [tokens])
        head, tail, count = memory.ring.tolist()
        positions.append((tail - head) % memory.free.numel())
        counted.append(count)
    return positions, counted


def _one_head(device: torch.device | str) -> PagedMemory:
    """Pages of two high or four low tokens, as many as a prompt of twelve takes at first."""
    layouts = [PageLayout(Precision.parse(name), head_dim=128, page_bytes=640) for name in ("K8V4", "K4V2")]
    return PagedMemory(
        layouts, pages=7, layers=1, kv_heads=1, max_requests=1, max_tokens=12, watermark=0.0, device=device, pool=False
    )
