"""``Transferred``: KVServe's profiles as a method of the compressed cache, to ask any task through them.

The prompt's keys and values are encoded, and the decode side goes on from what comes out of the frame (KVServe section
7, Metrics). Tokens that are decoded afterwards never cross the wire and stay as the model computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import code_bytes, decode_layer, encode_layer
from diffkv_repro.kvserve.header import Header
from diffkv_repro.kvserve.heads import HeadScores, score_heads
from diffkv_repro.kvserve.layout import KVLayout, LayerKV
from diffkv_repro.kvserve.prefill import pooled_votes
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.transform_state import AffineMaps, RotaryKeys
from diffkv_repro.models import LoadedModel
from diffkv_repro.models.hf import AttentionCall, AttentionLayout, UnsupportedAttention
from diffkv_repro.workloads.texts import load_texts

_WINDOW = 32  # last queries that vote on tokens, as in SnapKV
_CALIBRATION = {"texts": 2, "longest": 768}  # what heads are scored on where no file of scores is given


@dataclass(frozen=True)
class Transferred(Method):
    """``profile`` applied to every prompt, in FP16 as a server keeps it; ``assets`` are what its parts need.

    Bytes are those of the frames over 16-bit KV of the prompts; ``reads`` count as for any method. Token scores, which
    depend on the prompt, are taken from its last 32 queries.
    """

    profile: Profile
    layout: KVLayout
    assets: Assets = field(default_factory=Assets)
    name: str = ""

    code: ClassVar[tuple[str, ...]] = ("evaluation/transferred", "kvserve/*")

    def __post_init__(self) -> None:
        self.profile.codec.require()
        self.profile.state(self.assets)

    @classmethod
    def for_model(
        cls,
        model: LoadedModel,
        profile: str = "kvserve-default",
        texts: str = "prose",
        heads: Path | None = None,
        affine: Path | None = None,
    ) -> Self:
        """The profile that is named so or written as one line, with what it needs of ``model``.

        ``heads``: a file of :class:`HeadScores`; without one heads are scored on the first of ``texts``. ``affine``: a
        file of :class:`AffineMaps`. Raises ValueError for an unknown profile or a model whose cache no frame can hold.
        """
        if not isinstance(model, LoadedModel):
            raise ValueError("a profile needs the model with its weights' fingerprint: load it with load_model")
        chosen = profile if isinstance(profile, Profile) else Profile.parse(profile)
        return cls(chosen, layout_of(model), assets_for(model, chosen, texts=texts, heads=heads, affine=affine),
                   "" if profile == chosen or profile == str(chosen) else profile)  # fmt: skip

    @property
    def label(self) -> str:
        return self.name or str(self.profile)

    def check(self, layout: AttentionLayout) -> None:
        own = (self.layout.layers, self.layout.kv_heads, self.layout.head_dim)
        if (len(layout.layers), layout.kv_heads, layout.head_dim) != own:
            raise ValueError(f"the profile's layout is {self.layout}; the model has {layout}")

    def layer(self, place: Place, storage: str) -> LayerCache:
        del storage  # what crosses the wire is real bytes either way
        return _Layer(self, place)


class _Layer(LayerCache):
    """What arrived of a prompt, then what was computed here."""

    def __init__(self, method: Transferred, place: Place) -> None:
        super().__init__(place)
        self._method = method
        self._key = self._value = self._present = torch.empty(0)
        self._sent = KVBytes()
        self._dropped = False

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        columns = prompt.tokens
        starts = [0] * len(prompt.call.key) if rows.padding is None else rows.padding.tolist()
        self._key, self._value = torch.zeros_like(prompt.call.key), torch.zeros_like(prompt.call.value)
        self._present = torch.zeros(self._key.shape[:3], dtype=torch.bool, device=self._key.device)
        votes = self._votes(prompt)
        for row, start in enumerate(starts):
            layer = self._sent_and_back(prompt.call, row, start, votes)
            for mine, part in ((self._key, layer.key), (self._value, layer.value)):
                mine[row, :, start:] = part.to(mine)
            self._present[row, :, start:] = True if layer.kept is None else layer.kept.to(mine.device)
            self._dropped |= layer.kept is not None
        if not self._dropped and columns and not any(starts):
            self._present = torch.empty(0)

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        self._key = torch.cat([self._key, call.key], dim=2)
        self._value = torch.cat([self._value, call.value], dim=2)
        present = None
        if self._present.numel():
            count = self._key.shape[2] - self._present.shape[2]
            self._present = torch.nn.functional.pad(self._present, (0, count), value=True)
            present = self._present
        output, _ = attend(call, self._key, self._value, present)
        self.reads += call.query.shape[2]
        return output

    def kv_bytes(self, rows: Rows) -> KVBytes:
        return self._sent

    def select(self, rows: Tensor) -> None:
        self._key, self._value = self._key.index_select(0, rows), self._value.index_select(0, rows)
        if self._present.numel():
            self._present = self._present.index_select(0, rows)

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        batch, heads, columns = self._key.shape[:3]
        there = self._present.sum(dim=(0, 2)).tolist() if self._present.numel() else [batch * columns] * heads
        return {"transferred": there}

    def _sent_and_back(self, call: AttentionCall, row: int, start: int, votes: Tensor | None) -> LayerKV:
        """One prompt's keys and values after their frame; its bytes are counted."""
        method, index = self._method, self.place.layer
        layout, tokens = method.layout, call.key.shape[2] - start
        key, value = (part[row, :, start:].to("cpu", layout.dtype) for part in (call.key, call.value))
        assets = method.assets
        if votes is not None:
            # Only this layer's are asked for.
            assets = replace(assets, token_scores={index: votes[row, :, start:].cpu()})
        header = Header(method.profile, layout, 0, tokens, method.profile.state(method.assets))
        section = encode_layer(header, index, LayerKV(key, value), assets)
        codes = code_bytes(section)
        around = len(section) - codes + (0 if index else len(header.packed))
        self._sent += KVBytes(payload=codes, scales=around, full=layout.half_bytes(tokens) // layout.layers)
        return decode_layer(header, index, section, assets)

    def _votes(self, prompt: PromptAttention) -> Tensor | None:
        """Token scores [batch, kv_heads, tokens] where the quantizer ranks tokens."""
        if not self._method.profile.quantizer.ranks_tokens:
            return None
        return pooled_votes(prompt, _WINDOW)


def layout_of(loaded: LoadedModel) -> KVLayout:
    """The layout of FP16 frames. Raises UnsupportedAttention for sliding windows, whose caches frames do not hold."""
    if any(layer.kind != "full" for layer in loaded.layout.layers):
        raise UnsupportedAttention(f"{loaded.name} has layers with a sliding window; a frame holds whole caches only")
    return KVLayout.of(loaded, torch.float16)


def assets_for(
    loaded: LoadedModel,
    *profiles: Profile,
    texts: str | Sequence[str] = "prose",
    heads: Path | HeadScores | None = None,
    affine: Path | AffineMaps | None = None,
) -> Assets:
    """What the parts of ``profiles`` need of a model, and nothing else: head scores, its rotary keys, learnt maps."""
    found: dict[str, Any] = {}
    if heads is not None:
        found["heads"] = heads if isinstance(heads, HeadScores) else HeadScores.load(heads)
    elif any(profile.quantizer.ranks_heads for profile in profiles):
        given = (
            [own.text for own in load_texts(texts)[: _CALIBRATION["texts"]]] if isinstance(texts, str) else list(texts)
        )
        found["heads"] = score_heads(loaded, given, longest=_CALIBRATION["longest"])
    if affine is not None:
        found["affine"] = affine if isinstance(affine, AffineMaps) else AffineMaps.load(affine)
    if any(part.needs_rotary for profile in profiles for part in profile.transforms):
        found["rotary"] = RotaryKeys.of(loaded)
    return Assets(**found)
