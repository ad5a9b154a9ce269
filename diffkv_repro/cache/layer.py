"""``LayerCache``: what a compression method is to one layer, and the layer that compresses nothing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.attention import attend
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.models.hf import AttentionCall, AttentionLayout
from diffkv_repro.models.rope import Rope


@dataclass(frozen=True)
class Place:
    """Which layer of which model a cache is for.

    ``rope`` and ``key_bias`` [kv_heads, head_dim] are there only for methods that asked for them.
    """

    layer: int
    layout: AttentionLayout
    dtype: torch.dtype
    device: torch.device
    rope: Rope | None = None
    key_bias: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The sequences of a batch: ``padding`` [batch] columns of left padding (None without any), ``positions``
    [batch, columns] of every column so far as RoPE counts them."""

    padding: Tensor | None
    positions: Tensor


class LayerCache(ABC):
    """The compressed keys and values of one layer.

    The prompt comes whole, after its exact attention (DiffKV section 5: compression follows); later tokens come one
    or several at a time and attend over what is stored, their own entries included. ``reads`` counts the queries that
    were answered from the cache.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.reads = 0

    @abstractmethod
    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        """Store a prompt. Its output is not this layer's business."""

    @abstractmethod
    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        """Store the n new tokens of ``call`` and return their attention output [batch, heads, n, head_dim].

        Equal to n calls with one token each: a token never sees a decision taken after it.
        """

    @abstractmethod
    def kv_bytes(self, rows: Rows) -> KVBytes:
        """Bytes of this layer."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order (beam search)."""

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        """Stored tokens by precision, one number a KV head, over all sequences."""
        return {}

    def tensors(self) -> list[Tensor]:
        """What is really allocated; empty where bytes are only counted."""
        return []


class FullLayer(LayerCache):
    """Nothing compressed: FP16 itself, and the layers a method leaves alone.

    A sliding-window layer forgets what left its window, as the model's own cache does.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._window = place.layout.layers[place.layer].window

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        self._key, self._value = self._cut(prompt.call.key), self._cut(prompt.call.value)

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        key, value = torch.cat([self._key, call.key], dim=2), torch.cat([self._value, call.value], dim=2)
        output, _ = attend(call, key, value, self._present(key.shape[2], rows))
        self._key, self._value = self._cut(key), self._cut(value)
        self.reads += call.query.shape[2]
        return output

    def kv_bytes(self, rows: Rows) -> KVBytes:
        batch, kv_heads, columns, dim = self._key.shape
        held = self._held(rows)
        size = 4 * kv_heads * dim
        return KVBytes(payload=size * held, padding=size * (batch * columns - held), full=size * held)

    def select(self, rows: Tensor) -> None:
        self._key, self._value = self._key.index_select(0, rows), self._value.index_select(0, rows)

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        return {"K16V16": [self._held(rows)] * self._key.shape[1]}

    def _held(self, rows: Rows) -> int:
        """Tokens in each head, padding not among them."""
        batch, _, columns, _ = self._key.shape
        if rows.padding is None:
            return batch * columns
        hidden = rows.positions.shape[1] - columns
        return batch * columns - int((rows.padding - hidden).clamp_min(0).sum())

    def _cut(self, tensor: Tensor) -> Tensor:
        if self._window is None or tensor.shape[2] < self._window:
            return tensor
        return tensor[:, :, tensor.shape[2] - self._window + 1 :]

    def _present(self, columns: int, rows: Rows) -> Tensor | None:
        if rows.padding is None:
            return None
        hidden = rows.positions.shape[1] - columns
        column = torch.arange(columns, device=rows.padding.device)
        present = column >= (rows.padding - hidden)[:, None]
        return present[:, None].expand(-1, self._key.shape[1], -1)
