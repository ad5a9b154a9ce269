"""Sequences of exactly N tokens, drawn from documents by seed."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.workloads.texts import Document, TextError, load_texts, source_name


@dataclass(frozen=True)
class Window:
    """``input_ids`` [1, tokens] from one document, beginning ``start`` tokens into it."""

    document: str
    start: int
    input_ids: Tensor

    @property
    def label(self) -> str:
        """Short name for a figure."""
        return f"{self.document} @{self.start}"


def windows(documents: Sequence[Document], tokenizer, *, count: int, tokens: int, seed: int = 0) -> list[Window]:
    """``count`` windows of ``tokens`` tokens that do not overlap, the same for the same seed.

    Each document gives at most one window before any gives a second one, so that windows stay as different
    as the source allows. The tokenizer's own special tokens (a BOS, say) open every window. Raises TextError
    when the documents are too short, naming how many windows they hold.
    """
    if count < 1 or tokens < 2:
        raise ValueError(f"count is {count} and tokens is {tokens}; at least 1 window of 2 tokens is needed")
    prefix = _special_prefix(tokenizer)
    body = tokens - len(prefix)
    if body < 1:
        raise ValueError(f"{tokens} tokens leave no room beside the {len(prefix)} special tokens of the tokenizer")
    chooser = random.Random(seed)
    shuffled = list(documents)
    chooser.shuffle(shuffled)
    chosen: list[Window] = []
    later: list[Window] = []
    for document in shuffled:
        if len(chosen) == count:
            break
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        slots = len(ids) // body
        if slots == 0:
            continue
        offset = chooser.randint(0, len(ids) - slots * body)
        order = chooser.sample(range(slots), slots)
        found = [_window(document, ids, offset + slot * body, body, prefix) for slot in order]
        chosen.append(found[0])
        later.extend(found[1:])
    chooser.shuffle(later)
    chosen += later[: count - len(chosen)]
    if len(chosen) < count:
        raise TextError(
            f"{len(documents)} documents hold only {len(chosen)} windows of {tokens} tokens, {count} are wanted"
        )
    return chosen


def load_windows(
    sources: Sequence[str], tokenizer, *, count: int, tokens: int, seed: int = 0
) -> dict[str, list[Window]]:
    """:func:`windows` of each of several sources of texts, by the source's name."""
    names = [source_name(source) for source in sources]
    if len(set(names)) < len(names):  # two folders of one name
        names = [f"{name} {index}" for index, name in enumerate(names, start=1)]
    return {
        name: windows(load_texts(source), tokenizer, count=count, tokens=tokens, seed=seed)
        for name, source in zip(names, sources, strict=True)
    }


def source_names(sources: Sequence[str]) -> str:
    """Several sources for a figure's face."""
    return ", ".join(source_name(source) for source in sources)


def digest(chosen: Sequence[Window]) -> str:
    """Identity of the tokens of some windows, for the provenance of what was measured on them."""
    ids = b"".join(window.input_ids.numpy().tobytes() for window in chosen)
    return hashlib.sha256(ids).hexdigest()[:16]


def _window(document: Document, ids: list[int], start: int, body: int, prefix: list[int]) -> Window:
    return Window(
        document=document.name,
        start=start,
        input_ids=torch.tensor([prefix + ids[start : start + body]]),
    )


def _special_prefix(tokenizer) -> list[int]:
    """What the tokenizer puts in front of a text (Gemma and Llama 3: a BOS; SmolLM2 and Qwen: nothing)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return full[: full.index(plain[0])] if plain and plain[0] in full else []
