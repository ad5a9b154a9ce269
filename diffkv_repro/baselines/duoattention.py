"""DuoAttention (Xiao et al., ICLR 2025, arXiv:2410.10819): a whole cache for some heads, a short one for the others.

Retrieval heads keep every token. Streaming heads keep the first ``sink`` tokens and the ``recent`` latest ones, also as
generation goes on, so that their caches stop growing.

Defaults: 64 sink and 256 recent tokens, with which the released scripts evaluate (heads were trained with 128 and 256);
half of the heads retrieve, the paper's share for models with grouped queries (25 % without).

Deviations:

- The paper learns a gate for each KV head by optimisation on synthetic pass-keys. Here an induction test without any
  training ranks the heads (:mod:`diffkv_repro.attention_stats.head_classes`), and the best share of them retrieves.
- The paper's streaming heads look only at sinks and recent tokens within the prompt too. Here the prompt is attended to
  exactly, as for all methods, and cut afterwards.
- The newest token is counted among the recent ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from diffkv_repro.attention_stats.head_classes import retrieval_scores, top_heads
from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import LayerCache, Place
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.store import DROPPED
from diffkv_repro.cache.tiered import Move, Step, TieredLayer, TierRule
from diffkv_repro.core.precision import Precision
from diffkv_repro.models.hf import AttentionLayout, attention_layout
from diffkv_repro.models.zoo import LoadedModel


@dataclass(frozen=True)
class DuoAttention(Method):
    """``retrieval`` [layers][kv_heads] says which heads keep everything; a sliding-window layer's row is empty.

    It is found for a model by :meth:`for_model`.
    """

    retrieval: tuple[tuple[bool, ...], ...]
    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        rows = tuple(tuple(row) for row in self.retrieval)
        odd = [value for row in rows for value in row if not isinstance(value, bool)]
        if odd:
            raise ValueError(f"retrieval holds {odd[0]!r}; allowed are True and False")
        if not any(rows):
            raise ValueError(f"retrieval is {self.retrieval!r}; it must be [layers][kv_heads] truth values")
        object.__setattr__(self, "retrieval", rows)
        if self.sink < 0:
            raise ValueError(f"sink is {self.sink}; it must be at least 0")
        if self.recent < 1:
            raise ValueError(f"recent is {self.recent}; at least the newest token must be kept")

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel | LoadedModel,
        keep: float = 0.5,
        sink: int = 64,
        recent: int = 256,
        seed: int = 0,
        length: int = 256,
    ) -> Self:
        """Run the induction test and let the best ``keep`` of all KV heads retrieve.

        ``seed`` and ``length`` are of the test's random tokens; the text ends up twice as long.
        """
        if not 0 <= keep <= 1:
            raise ValueError(f"keep is {keep}; allowed are 0 to 1")
        layout = attention_layout(model.model if isinstance(model, LoadedModel) else model)
        full = [index for index, layer in enumerate(layout.layers) if layer.kind == "full"]
        return cls(top_heads(retrieval_scores(model, length=length, seed=seed), keep, full), sink, recent)

    @property
    def share(self) -> float:
        """Share of the heads that retrieve."""
        heads = [value for row in self.retrieval for value in row]
        return sum(heads) / len(heads)

    @property
    def label(self) -> str:
        return f"DuoAttention {self.share * 100:.3g} %"

    def check(self, layout: AttentionLayout) -> None:
        if len(self.retrieval) != len(layout.layers):
            raise ValueError(f"retrieval is for {len(self.retrieval)} layers, the model has {len(layout.layers)}")
        for index, (row, layer) in enumerate(zip(self.retrieval, layout.layers, strict=True)):
            if layer.kind == "full" and len(row) != layout.kv_heads:
                raise ValueError(f"retrieval has {len(row)} heads in layer {index}, the model {layout.kv_heads}")

    def layer(self, place: Place, storage: str) -> LayerCache:
        return TieredLayer(place, _Streaming(self, place), storage=storage)


class _Streaming(TierRule):
    precisions = (Precision(16, 16),)

    def __init__(self, method: DuoAttention, place: Place) -> None:
        self._method = method
        self._streams = ~torch.tensor(method.retrieval[place.layer], device=place.device)
        self.decides = bool(self._streams.any())

    def prompt(self, prompt: PromptAttention, padding: Tensor) -> Tensor:
        column = torch.arange(prompt.tokens, device=padding.device)
        sink = column < padding[:, None] + self._method.sink
        kept = sink | (column >= prompt.tokens - self._method.recent)
        return torch.where(kept[:, None] | ~self._streams[:, None], 0, DROPPED).to(torch.int8)

    def step(self, step: Step) -> Iterable[Move]:
        # The token about to enter is one of the recent ones, so the oldest of them leaves.
        leaving = step.columns - self._method.recent
        if leaving < 0:
            return
        past_sink = leaving >= step.padding + self._method.sink
        where = past_sink[:, None] & self._streams & (step.tier[..., leaving] != DROPPED)
        yield Move(
            torch.full(where.shape, leaving, device=where.device),
            torch.full(where.shape, DROPPED, dtype=torch.int8, device=where.device),
            where,
        )
