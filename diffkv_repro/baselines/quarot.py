"""QuaRot: keys and values turned by a Hadamard matrix, so that no channel is an outlier, then 4 bits per token.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024. Keys are turned after RoPE, the
queries with them, which leaves their products as they are. Values are turned in the weights of the value and output
projections; here they are turned as they come and the output is turned back, which gives the same numbers. The
published cache has asymmetric 4 bits, groups of 128 channels and a clipping ratio of 0.95. Those are the defaults here,
with a group of 128 channels read as what it is in Llama 2: one head vector.

Deviations:

- Only the cache is treated: weights, activations and the residual stream are neither rotated nor quantised.
- The matrix is Hadamard wherever an order is known (``core.hadamard``), with random signs only where ``seed`` asks
  for them. QuaRot has a plain one for the heads and random signs in the residual stream.
- Clipping shrinks minimum and maximum towards zero. A group on one side of zero, which rotated vectors hardly ever
  are, is left alone, as it would be moved and not shrunk.
- Zero points are FP16 minima and not integers (see ``core.quantize``).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.baselines.int4 import require_group, uniform
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.tiered import KeepAll, TieredLayer
from diffkv_repro.core.hadamard import rotation
from diffkv_repro.models.hf import AttentionCall, AttentionLayout

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class QuaRot(Method):
    """``bits`` over groups of ``group`` channels (None: the head vector), whose range is shrunk to ``clip`` of it.

    ``seed`` draws random signs for the channels before they are turned; None for none.
    """

    bits: int = 4
    group: int | None = None
    clip: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits!r}; allowed are {', '.join(map(str, _BITS))}")
        require_group(self.group)
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip is {self.clip}; allowed are numbers above 0, up to 1 for no clipping")
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number from 0, or None")

    @property
    def label(self) -> str:
        return f"QuaRot {self.bits}-bit"

    def check(self, layout: AttentionLayout) -> None:
        uniform(self.bits, self.group, layout.head_dim)

    def layer(self, place: Place, storage: str) -> LayerCache:
        return _RotatedLayer(place, self, storage)


class _RotatedLayer(TieredLayer):
    """Stores, and attends over, what is turned; turns the output back.

    Turning one query instead of every stored key keeps a step as cheap as without rotation.
    """

    def __init__(self, place: Place, method: QuaRot, storage: Literal["simulated", "packed"]) -> None:
        dim = place.layout.head_dim
        super().__init__(place, KeepAll(uniform(method.bits, method.group, dim)), storage=storage)
        self._turn = rotation(dim, seed=method.seed, device=place.device)
        self._back = self._turn.T.contiguous()
        self._group = min(method.group or dim, dim)
        self._clip = method.clip

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        super().prefill(PromptAttention(self._turned(prompt.call), prompt.padding), rows)

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        output = super().decode(self._turned(call), rows)
        return torch.matmul(output.float(), self._back).to(output.dtype)

    def _turned(self, call: AttentionCall) -> AttentionCall:
        dtype = call.query.dtype
        query, key, value = (torch.matmul(t.float(), self._turn) for t in (call.query, call.key, call.value))
        key, value = self._clipped(key), self._clipped(value)
        return replace(call, query=query.to(dtype), key=key.to(dtype), value=value.to(dtype))

    def _clipped(self, vectors: Tensor) -> Tensor:
        """Groups within ``clip`` of their own range: quantising those is quantising with a clipped range."""
        if self._clip == 1:
            return vectors
        grouped = vectors.unflatten(-1, (-1, self._group))
        low, high = torch.aminmax(grouped, dim=-1, keepdim=True)
        share = torch.where((low < 0) & (high > 0), self._clip, 1.0)
        return torch.clamp(grouped, low * share, high * share).flatten(-2)
