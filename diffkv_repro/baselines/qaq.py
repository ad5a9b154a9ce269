"""QAQ: as many bits for each key and value as its range and the attention it gets ask for.

Dong et al., "QAQ: Quality Adaptive Quantization for LLM KV Cache", 2024 (arXiv:2403.04643), section 4. For an output
whose error is at most sigma(X), and attention scores whose error is at most sigma(S), a token may have an error of

    sigma(V) = sigma(X) / (sqrt(T) S)                            in its value, linear in its attention score S
    sigma(K) = sqrt(log(T^3 / (T - 1) sigma(S)^2 + 1)) / |Q|     in its key, which acts through an exponential

with T tokens and queries of norm |Q|; the score of the token itself is not in the second. A vector whose values span
``range`` needs B = ceil(log2(range / (2 sqrt(3) sigma))) bits. S is predicted as the largest score that any of the
last ``window`` queries gave. Outliers, a share of ``outliers`` with half of them at either end, stay in FP16.
Published: a window of 5, 1 % of outliers, any whole number of bits. The sigmas are hyperparameters; DiffKV's Table 1
has QAQ at 18.8 %, which is a mean of 3 bits.

Here a vector is one KV head of one token, and its score the largest over that head's query heads. As in the released
code, tokens that fewer than ``window`` queries have seen are not quantised yet. One outlier at least is kept at
either end, so their share of a small head is larger than 1 %.

Deviations:

- sigma(X) and sigma(K) are not given: each is set once for every sequence and layer, to the least that keeps the mean
  over the tokens of the prompt at ``bits``. The norm of the queries, one number in the paper, is part of it. So every
  layer has the same mean; that of generation, which keeps the sigmas, is near it.
- Bits are decided once, when the window has passed over a token. The paper decides anew at every step, and fetches
  originals from CPU memory for tokens that turn out to need more.
- For the same reason sigma(X) is another one in generation. A token of generation is judged by the attention it gets
  when it is young, which is more than it gets later. So this one is set by what the newest 64 tokens of the prompt got
  when they were as young.
- A prompt too short to have a quantised token sets no sigmas: its sequence has ``bits``, rounded down, throughout.
- Young tokens are in FP16 and not in the largest number of bits. Scales and zeros are FP16.
"""

from dataclasses import dataclass
from math import ceil, inf, nan

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.baselines.columns import half_of, part_of, present_in, starts_of, to_half
from diffkv_repro.baselines.qaq_store import Packed, Simulated, channel_type, inner_range
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.storages import require_storage
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.packing import packed_bytes
from diffkv_repro.models.hf import AttentionCall

_YOUNG = 64  # tokens of a prompt that stand for those of generation


@dataclass(frozen=True)
class Qaq(Method):
    """A mean of ``bits`` for keys and ``value_bits`` (None: the same) for values, each from ``least`` to ``most``."""

    bits: float = 3.0
    value_bits: float | None = None
    window: int = 5
    outliers: float = 0.01
    least: int = 1
    most: int = 8

    def __post_init__(self) -> None:
        if not (isinstance(self.least, int) and isinstance(self.most, int) and 1 <= self.least <= self.most <= 8):
            raise ValueError(
                f"least and most are {self.least!r} and {self.most!r}; allowed are 1 <= least <= most <= 8"
            )
        for name, mean in zip(("bits", "value_bits"), self.means, strict=True):
            if not self.least <= mean <= self.most:
                raise ValueError(f"{name} is {mean}; a mean of {self.least} to {self.most} is allowed")
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}; it must be a whole number of queries of at least 1")
        if not 0 <= self.outliers <= 0.5:
            raise ValueError(f"outliers is {self.outliers}; allowed are shares from 0 to 0.5")

    @property
    def means(self) -> tuple[float, float]:
        """Mean bits of keys and of values."""
        return self.bits, self.bits if self.value_bits is None else self.value_bits

    @property
    def label(self) -> str:
        return f"QAQ {sum(self.means) / 2:g}-bit"

    def layer(self, place: Place, storage: str) -> LayerCache:
        require_storage(storage)
        return _QaqLayer(place, self, storage)


def shift_for(need: Tensor, mean: float, least: int, most: int) -> float:
    """The largest c for which :func:`bits_of` of ``need`` [n] has a mean of at most ``mean``; NaN for no tokens.

    A token gets its k-th bit where need + c > k - 1. Of all the c at which some token gets one more bit, it is the
    first that the mean has no room for (which itself still is too small for it).
    """
    if not need.numel():
        return nan
    steps = torch.arange(least, most, device=need.device)[:, None] - need
    room = int((mean - least) * need.numel() + 1e-6)  # 60 x 1.3 are 78, in floating point too
    return inf if room >= steps.numel() else float(steps.flatten().kthvalue(room + 1).values)


def bits_of(need: Tensor, shift: Tensor, mean: float, least: int, most: int) -> Tensor:
    """Bits uint8 like ``need``: ceil(need + ``shift``) within least to most; ``mean`` rounded down for NaN shifts."""
    bits = torch.full_like(need, least, dtype=torch.uint8)
    for step in range(least, most):
        bits += step - need < shift
    return torch.where(shift.isnan(), int(mean), bits).to(torch.uint8)


class _QaqLayer(LayerCache):
    """Which vector gets how many bits; the stores know how. Vectors are the keys of all KV heads, then the values."""

    def __init__(self, place: Place, method: Qaq, storage: str) -> None:
        super().__init__(place)
        self._method = method
        self._kind = Packed if storage == "packed" else Simulated
        self._half = half_of(place.dtype)
        dim = place.layout.head_dim
        self._side = min(ceil(method.outliers / 2 * dim), (dim - 1) // 2)
        self._starts: list[int] = []
        self._columns = 0
        # -log2 of sigmas and constants, float32 [batch, 3]: of keys, of values in the prompt, of values in generation.
        self._shift: Tensor | None = None
        self._bits: Tensor | None = None  # uint8 [quantised columns, batch, vectors]; 0 is padding
        self._scores: Tensor | None = None  # largest so far, [batch, kv_heads, columns that are not quantised]
        self._store: Simulated | Packed | None = None

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        method, kv_heads = self._method, self.place.layout.kv_heads
        self._columns = prompt.tokens
        vectors = self._vectors(prompt.call)
        self._starts = starts_of(rows.padding, len(vectors))
        self._store = self._kind(vectors, self.place.dtype, self._side)
        self._bits = torch.empty(0, *vectors.shape[:2], dtype=torch.uint8, device=vectors.device)
        self._scores, young = self._predicted(prompt)
        ready, recent = max(0, prompt.tokens - method.window + 1), young.shape[-1]
        spans = self._spans(ready)
        need = self._need(spans, self._scores[..., :ready], torch.tensor([prompt.tokens], device=spans.device))
        # What the newest of these tokens would have needed when they were young, by the attention that they got then.
        then = torch.arange(ready - recent, ready, device=spans.device) + method.window
        early = self._need(spans[..., ready - recent :], young, then)[:, kv_heads:]
        key_bits, value_bits = method.means
        shifts = [
            [
                shift_for(own[:kv_heads, start:].flatten(), key_bits, method.least, method.most),
                shift_for(own[kv_heads:, start:].flatten(), value_bits, method.least, method.most),
                shift_for(fresh[:, max(0, start - ready + recent) :].flatten(), value_bits, method.least, method.most),
            ]
            for own, fresh, start in zip(need, early, self._starts, strict=True)
        ]
        self._shift = torch.tensor(shifts, dtype=torch.float32, device=vectors.device)
        self._seal(need, self._shift[:, :2])

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        # Bits follow from attention that met the bits of tokens before: there is no taking in several at once.
        count = call.query.shape[2]
        self.reads += count
        outputs = [self._step(part_of(call, index, index + 1)) for index in range(count)]
        return torch.cat(outputs, dim=2) if count > 1 else outputs[0]

    def kv_bytes(self, rows: Rows) -> KVBytes:
        layout, batch = self.place.layout, len(self._starts)
        dim, heads = layout.head_dim, 2 * layout.kv_heads
        counts = torch.bincount(self._bits.flatten(), minlength=9).tolist()
        vectors = sum(counts[1:])
        young = sum(min(self._columns - start, self._scores.shape[-1]) for start in self._starts)
        index = 2 * self._side * channel_type(dim).itemsize
        parts = {
            "payload": sum(bits * count for bits, count in enumerate(counts)) * dim // 8,
            "scales": vectors * (4 + 4 * self._side),
            "scores": 4 * young * layout.kv_heads,
            "window": 2 * dim * young * heads,
            "tables": vectors * (index + 1) + 12 * batch,
        }
        codes = sum(count * packed_bytes(dim, bits) for bits, count in enumerate(counts) if bits)
        recent = batch * self._scores.shape[-1] * (2 * dim * heads + 4 * layout.kv_heads)
        allocated = codes + vectors * (4 + 4 * self._side + index) + self._bits.numel() + 12 * batch + recent
        tokens = sum(self._columns - start for start in self._starts)
        return KVBytes(**parts, padding=allocated - sum(parts.values()), full=2 * dim * heads * tokens)

    def select(self, rows: Tensor) -> None:
        self._store.select(rows, self._bits)
        self._bits = self._bits.index_select(1, rows)
        self._shift, self._scores = self._shift.index_select(0, rows), self._scores.index_select(0, rows)
        self._starts = [self._starts[row] for row in rows.tolist()]

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        kv_heads = self.place.layout.kv_heads
        pair = self._bits[..., :kv_heads] * 16 + self._bits[..., kv_heads:]
        counts = {
            f"K{both // 16}V{both % 16}": (pair == both).sum(dim=(0, 1)).tolist()
            for both in pair.unique().tolist()
            if both
        }
        young = sum(min(self._columns - start, self._scores.shape[-1]) for start in self._starts)
        return counts | {"K16V16": [young] * kv_heads}

    def tensors(self) -> list[Tensor]:
        stored = self._store.tensors()
        return [*stored, self._bits, self._shift, self._scores] if stored else []

    def _step(self, call: AttentionCall) -> Tensor:
        kv_heads = self.place.layout.kv_heads
        self._columns += 1
        self._store.append(self._vectors(call))
        dense = self._store.view(self._bits)
        present = present_in(self._starts, self._columns, kv_heads, dense.device)
        output, weights = attend(call, dense[:, :kv_heads], dense[:, kv_heads:], present)
        scores = weights[:, :, :, 0].amax(dim=2)[..., len(self._bits) :]
        self._scores = torch.maximum(torch.nn.functional.pad(self._scores, (0, 1)), scores)
        count = self._scores.shape[-1] - self._method.window + 1
        if count > 0:
            columns = torch.tensor([self._columns], device=scores.device)
            self._seal(self._need(self._spans(count), self._scores[..., :count], columns), self._shift[:, ::2])
        return output

    def _predicted(self, prompt: PromptAttention) -> tuple[Tensor, Tensor]:
        """Largest score of each token from the last ``window`` queries, [batch, kv_heads, tokens]; and of the newest
        tokens that had so many queries from their first ``window`` ones, [batch, kv_heads, n]."""
        window, kv_heads = self._method.window, self.place.layout.kv_heads
        scores = prompt.rows(_YOUNG + window - 1).unflatten(1, (kv_heads, -1)).amax(dim=2)
        count = scores.shape[2]
        last = scores[:, :, max(0, count - window) :].amax(dim=2)
        square = scores[..., scores.shape[-1] - count :]
        recent = max(0, count - window + 1)
        first = [torch.diagonal(square, -later, dim1=-2, dim2=-1)[..., :recent] for later in range(window)]
        return last, torch.stack(first).amax(dim=0) if recent else last[..., :0]

    def _spans(self, count: int) -> Tensor:
        """log2 of the ranges [batch, vectors, count] of the oldest columns that are not quantised yet."""
        low, high, _ = inner_range(self._store.young(len(self._bits), count), self._side)
        return torch.log2(high - low)

    def _need(self, spans: Tensor, scores: Tensor, columns: Tensor) -> Tensor:
        """log2(range / sigma) but for a constant, [batch, vectors, n]; ``scores`` [batch, kv_heads, n], and ``columns``
        [n] or [1] that there were when they were given."""
        tokens = (columns - torch.tensor(self._starts, device=spans.device)[:, None, None]).clamp_min(1)
        keys, values = spans.split(self.place.layout.kv_heads, dim=1)
        return torch.cat([keys, values + torch.log2(scores * tokens.sqrt())], dim=1)

    def _seal(self, need: Tensor, shift: Tensor) -> None:
        """Quantise the oldest columns as ``need`` [batch, vectors, n] and ``shift`` [batch, 2] say."""
        method, kv_heads, first = self._method, self.place.layout.kv_heads, len(self._bits)
        count = need.shape[-1]
        halves = [
            bits_of(part, shift[:, index, None, None], mean, method.least, method.most)
            for index, (part, mean) in enumerate(zip(need.split(kv_heads, dim=1), method.means, strict=True))
        ]
        bits = torch.cat(halves, dim=1).permute(2, 0, 1)
        if first < max(self._starts):
            column = torch.arange(first, first + count, device=need.device)[:, None]
            bits = bits * (column >= torch.tensor(self._starts, device=need.device))[..., None]
        self._store.seal(first, bits)
        self._bits = torch.cat([self._bits, bits])
        self._scores = self._scores[..., count:].clone()

    def _vectors(self, call: AttentionCall) -> Tensor:
        """New keys and values in 16 bits, [batch, vectors, n, head_dim]."""
        return to_half(torch.cat([call.key, call.value], dim=1), self._half)
