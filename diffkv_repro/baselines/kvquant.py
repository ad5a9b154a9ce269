"""KVQuant: keys per channel before RoPE, values per token, levels where the values are, outliers kept exactly.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", NeurIPS 2024.
Published settings: 2, 3 or 4 bits with 1 % of outliers (written nuq3-1%), the first token in FP16. Three bits are the
paper's headline and the default here.

- A channel's range lies between its 0.5 % and 99.5 % quantiles; keys outside are outliers. A value is an outlier at or
  beyond those quantiles of its own token, over the channels of all KV heads, so every token has some at either end.
- What is inside is brought to -1 to 1 and stored as the nearest of 2**bits levels, from one codebook for keys and one
  for values.
- Outliers are stored as FP16 with an index, in addition to their code (int32 for keys, int16 for values).

Deviations:

- Ranges of channels and codebooks come from the prompt and not from calibration texts, per sequence and layer. What
  a prompt has not shown is out of range, and so exact, but takes more room: ``true_ratio`` tells. A prompt of sinks
  alone gives no range at all, and all later keys are outliers.
- Codebooks are fitted without Fisher information. A value weighs as the square of its range instead, which makes
  the error that is minimised one of the keys and values themselves.
- Tokens of generation use the prompt's codebooks and, for keys, its ranges; values always have their own range.
- No Q-Norm (which shifts the levels of a 2-bit codebook), and no cap on outliers a token.
- Keys come rotated and are turned back (``Unrotated``), which rounds them once more in a half-precision model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.baselines.columns import half_of, present_in, starts_of
from diffkv_repro.baselines.kvquant_codec import Codec, outliers_a_side
from diffkv_repro.baselines.kvquant_store import Packed, Simulated
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.storages import require_storage
from diffkv_repro.cache.transforms import Unrotated
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.packing import packed_bytes
from diffkv_repro.models.hf import AttentionCall, UnsupportedAttention

_BITS = (2, 3, 4)


@dataclass(frozen=True)
class KVQuant(Method):
    """``bits`` for keys and values, a share of ``outliers``, the first ``sink`` tokens of a sequence in FP16."""

    bits: int = 3
    outliers: float = 0.01
    sink: int = 1

    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits!r}; allowed are {', '.join(map(str, _BITS))}")
        if not 0 <= self.outliers <= 0.5:
            raise ValueError(f"outliers is {self.outliers}; allowed are shares from 0 to 0.5")
        if not isinstance(self.sink, int) or self.sink < 0:
            raise ValueError(f"sink is {self.sink!r}; it must be a whole number from 0")

    @property
    def label(self) -> str:
        return f"KVQuant {self.bits}-bit"

    def layer(self, place: Place, storage: str) -> LayerCache:
        require_storage(storage)
        if place.rope is None:
            raise UnsupportedAttention(f"layer {place.layer}: keys before RoPE need the model's rotary embedding")
        return _KVQuantLayer(place, self, storage)


class _KVQuantLayer(LayerCache):
    """The codec decides once, on the prompt; from then on every token is on its own."""

    def __init__(self, place: Place, method: KVQuant, storage: str) -> None:
        super().__init__(place)
        self._method = method
        self._kind = Packed if storage == "packed" else Simulated
        self._transform = Unrotated(place.rope)
        self._width = place.layout.kv_heads * place.layout.head_dim
        self._starts: list[int] = []
        self._columns = 0
        self._first = 0  # columns before it hold sinks and padding only, in all sequences
        self._outliers: Tensor | None = None  # keys stored as such, of each sequence
        self._store: Simulated | Packed | None = None

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        method, call = self._method, prompt.call
        self._starts = starts_of(rows.padding, call.key.shape[0])
        self._first = min(self._starts) + method.sink
        self._columns = 0
        self._outliers = torch.zeros(len(self._starts), dtype=torch.long, device=self.place.device)
        key, value = self._flat(call, rows)
        spans = [slice(start + method.sink, prompt.tokens) for start in self._starts]
        codec = Codec.of_prompt(key, value, spans, 2**method.bits, method.outliers, half_of(self.place.dtype))
        self._store = self._kind(codec, self.place, method.bits, method.sink, self._first)
        self._add(key, value, rows)

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        self._add(*self._flat(call, rows), rows)
        key, value = self._store.view(self._starts, rows.positions, self._transform)
        output, _ = attend(call, key, value, present_in(self._starts, self._columns, key.shape[1], key.device))
        self.reads += call.query.shape[2]
        return output

    def kv_bytes(self, rows: Rows) -> KVBytes:
        tokens, sinks = self._totals()
        coded, exact = tokens - sinks, int(self._outliers.sum())
        batch, width, bits = len(self._starts), self._width, self._method.bits
        sparse = 2 * outliers_a_side(width, self._method.outliers)
        columns = max(0, self._columns - self._first)
        held = (
            batch * columns * (2 * packed_bytes(width, bits) + 4 + 4 * sparse) + batch * self._method.sink * 4 * width
        )
        books = batch * 2 * 2 * 2**bits
        parts = {
            "payload": 2 * coded * width * bits // 8,
            "scales": 4 * batch * width + coded * (4 + 2 * sparse) + 2 * exact,
            "window": 4 * sinks * width,
            "tables": books + 2 * coded * sparse + 4 * exact,
        }
        allocated = held + 6 * exact + 4 * batch * width + books
        return KVBytes(**parts, padding=allocated - sum(parts.values()), full=4 * tokens * width)

    def select(self, rows: Tensor) -> None:
        self._store.select(rows)
        self._outliers = self._outliers.index_select(0, rows)
        self._starts = [self._starts[row] for row in rows.tolist()]

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        tokens, sinks = self._totals()
        bits, kv_heads = self._method.bits, self.place.layout.kv_heads
        return {f"K{bits}V{bits}": [tokens - sinks] * kv_heads, "K16V16": [sinks] * kv_heads}

    def tensors(self) -> list[Tensor]:
        return self._store.tensors()

    def _add(self, key: Tensor, value: Tensor, rows: Rows) -> None:
        before, self._columns = self._columns, self._columns + key.shape[1]
        coded = self._store.codec.code(key, value)
        sink = None
        if before < max(self._starts) + self._method.sink:
            # Padding has no outliers and neither have sinks, which are kept apart whole.
            column = torch.arange(before, self._columns, device=key.device)
            start = torch.tensor(self._starts, device=key.device)[:, None]
            sink = (column >= start) & (column < start + self._method.sink)
            coded.key_outlier &= (column >= start + self._method.sink)[..., None]
        self._outliers += coded.key_outlier.sum(dim=(1, 2))
        self._store.append(coded, sink, rows.positions[:, before : self._columns], self._transform)

    def _flat(self, call: AttentionCall, rows: Rows) -> tuple[Tensor, Tensor]:
        """New keys before RoPE, and values, [batch, tokens, width]."""
        positions = rows.positions[:, rows.positions.shape[1] - call.key.shape[2] :]
        key = self._transform.forward(call.key, positions)
        return key.transpose(1, 2).flatten(2), call.value.transpose(1, 2).flatten(2)

    def _totals(self) -> tuple[int, int]:
        """Tokens, and sinks among them, of all sequences."""
        lengths = [self._columns - start for start in self._starts]
        return sum(lengths), sum(min(length, self._method.sink) for length in lengths)
