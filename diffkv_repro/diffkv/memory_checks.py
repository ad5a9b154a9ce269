"""What callers of the memory manager may pass; each refusal names the value and what is allowed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.diffkv.layout import PageLayout


def check_integer(name: str, value: object, least: int, most: int) -> None:
    """Raises ValueError unless ``value`` is a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed are whole numbers from {least} to {most}")


def checked_integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """As a list of int; a tensor on a GPU is read back. Raises ValueError for anything else, such as a mask."""
    if isinstance(values, Tensor):
        if values.dtype.is_floating_point or values.dtype == torch.bool or values.ndim != 1:
            raise ValueError(f"{name} are {values.dtype} {list(values.shape)}; they must be a row of whole numbers")
        return values.tolist()
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} hold {value!r}; they must be whole numbers")
    return list(values)


def checked_layouts(layouts: Sequence[PageLayout]) -> tuple[PageLayout, ...]:
    """One page layout a tier. Raises ValueError for none and for different head_dim or page size."""
    layouts = tuple(layouts)
    if not layouts:
        raise ValueError("no layout; there must be one a tier, and at least one tier")
    shapes = sorted({(layout.head_dim, layout.page_bytes) for layout in layouts})
    if len(shapes) > 1:
        raise ValueError(f"layouts have (head_dim, page_bytes) of {shapes}; pages of one pool are all alike")
    return layouts


def check_slots(
    slots: Sequence[int], wanted: Literal["empty", "admitted", "in use"], *, max_requests: int,
    prompts: Mapping[int, int], compacted: Collection[int],
) -> None:  # fmt: skip
    """Raises ValueError for slots that do not exist, are named twice, or are not as ``wanted``."""
    for slot in slots:
        if not 0 <= slot < max_requests:
            raise ValueError(f"slot {slot} does not exist; slots are 0 to {max_requests - 1}")
        if wanted == "empty" and slot in prompts:
            raise ValueError(f"slot {slot} holds a request; it must be released before another is admitted")
        if wanted != "empty" and slot not in prompts:
            raise ValueError(f"slot {slot} holds no request; those in use are {sorted(prompts) or 'none'}")
        if wanted == "admitted" and slot in compacted:
            raise ValueError(f"slot {slot} is compacted already; a prompt is compacted once")
    if len(set(slots)) < len(slots):
        twice = next(slot for slot in slots if list(slots).count(slot) > 1)
        raise ValueError(f"slot {twice} is named twice; a slot appears once in a batch")


def check_lengths(lengths: Tensor, prompts: Sequence[int], pages: Sequence[int], tier_tokens: Tensor) -> None:
    """Raises ValueError where planned ``lengths`` [n, layers, kv_heads, tiers] cannot be those of the prompts.

    ``prompts`` are tokens and ``pages`` the pages of a head, for each of the n requests.
    """
    device = lengths.device
    wide = lengths.long()
    stored = wide.sum(dim=-1)
    needed = (wide + tier_tokens - 1).div(tier_tokens, rounding_mode="floor").sum(dim=-1)
    limit, held = (torch.tensor(values, device=device)[:, None, None] for values in (prompts, pages))
    negative, long, large = (wide < 0).any(dim=-1), stored > limit, needed > held
    if not bool((negative | long | large).any()):  # the only look at the device where all is well
        return
    for wrong, say in (
        (negative, lambda k, at: f"lengths {lengths[at].tolist()}; they are 0 or more"),
        (long, lambda k, at: f"{int(stored[at])} tokens in its tiers; its prompt has {prompts[k]}"),
        (
            large,
            lambda k, at: f"{int(needed[at])} pages to keep for {lengths[at].tolist()} tokens, but holds {pages[k]}",
        ),
    ):
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(f"request {at[0]} of the batch, layer {at[1]}, KV head {at[2]} has {say(at[0], at)}")
