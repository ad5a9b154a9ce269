"""What is sent: the KV cache of some successive tokens of one request, and the shape of the model it belongs to."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.models.zoo import LoadedModel

DTYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32}
DTYPE_IDS = {dtype: index for index, dtype in DTYPES.items()}


@dataclass(frozen=True)
class KVLayout:
    """Shape of a model's KV cache and what makes it this model's: dtype, rotary embedding and weights, in words.

    ``rope`` describes the rotary embedding; ``model`` identifies the weights ("" where any will do).
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    rope: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        for name, most in (("layers", 1 << 12), ("kv_heads", 1 << 12), ("head_dim", 1 << 12)):
            require_whole(name, getattr(self, name), 1, most)
        if self.dtype not in DTYPE_IDS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_IDS)
            raise ValueError(f"dtype is {self.dtype!r}; allowed are {names}")

    @classmethod
    def of(cls, loaded: LoadedModel, dtype: torch.dtype | None = None) -> Self:
        """The layout of a loaded model's cache, kept in ``dtype`` (the model's own unless given)."""
        return cls(
            layers=len(loaded.layout.layers),
            kv_heads=loaded.layout.kv_heads,
            head_dim=loaded.layout.head_dim,
            dtype=dtype or loaded.model.dtype,
            rope=rope_words(loaded.model.config),
            model=loaded.fingerprint,
        )

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ between models: every field counts."""
        words = (self.layers, self.kv_heads, self.head_dim, str(self.dtype), self.rope, self.model)
        return hashlib.sha256("\0".join(map(str, words)).encode()).digest()[:16]

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of ``tokens`` tokens as the model keeps them."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * self.dtype.itemsize

    def half_bytes(self, tokens: int) -> int:
        """The same in 16 bits, which is what published compression ratios divide by."""
        return 4 * self.layers * self.kv_heads * self.head_dim * tokens

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layers} layers x {self.kv_heads} KV heads x {self.head_dim}, {dtype}"


def rope_words(config: PreTrainedConfig) -> str:
    """The rotary embedding of a transformers configuration in words, "" where there is none."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return ", ".join(f"{key}={rope[key]}" for key in sorted(rope))


@dataclass(frozen=True)
class LayerKV:
    """One layer: ``key`` and ``value`` [kv_heads, tokens, head_dim]; ``kept`` bool [kv_heads, tokens] says which
    tokens are there at all, None for all of them. What is not kept is zero, and attention has to mask it."""

    key: Tensor
    value: Tensor
    kept: Tensor | None = None


@dataclass(frozen=True)
class KV:
    """Layers of a request's cache in order; the first token is at position ``start`` of the sequence."""

    layers: tuple[LayerKV, ...]
    start: int = 0

    @classmethod
    def of(cls, kv: "KV | Iterable[tuple[Tensor, Tensor]]", start: int = 0) -> Self:
        """From (key, value) pairs [kv_heads, tokens, head_dim], perhaps with a batch of 1 in front."""
        if isinstance(kv, cls):
            return kv
        return cls(tuple(LayerKV(_unbatched(key), _unbatched(value)) for key, value in kv), start)

    @property
    def tokens(self) -> int:
        """Tokens of every layer."""
        return self.layers[0].key.shape[1]

    def first(self, tokens: int) -> "KV":
        """The cache of the first ``tokens`` alone, which is that of a shorter prompt."""
        if tokens == self.tokens:
            return self
        cut = tuple(
            LayerKV(
                layer.key[:, :tokens], layer.value[:, :tokens], None if layer.kept is None else layer.kept[:, :tokens]
            )
            for layer in self.layers
        )
        return KV(cut, self.start)

    @property
    def pairs(self) -> Sequence[tuple[Tensor, Tensor]]:
        """(key, value) of every layer, as a transformers cache takes them with a batch dimension in front."""
        return [(layer.key, layer.value) for layer in self.layers]


def _unbatched(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        if tensor.shape[0] != 1:
            raise ValueError(f"keys or values are {tuple(tensor.shape)}; a frame is of one request, a batch of 1")
        return tensor[0]
    return tensor


def require_shape(layer: LayerKV, layout: KVLayout, tokens: int) -> None:
    """Raise ValueError unless keys and values are what ``layout`` says, in main memory."""
    shape = (layout.kv_heads, tokens, layout.head_dim)
    for name, tensor in (("key", layer.key), ("value", layer.value)):
        if tuple(tensor.shape) != shape or tensor.dtype != layout.dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; the layout says {layout.dtype} {shape}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; frames are made from main memory: call .cpu() first")
