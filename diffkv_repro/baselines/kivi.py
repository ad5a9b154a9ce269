"""KIVI: keys in 2 bits per channel, values in 2 bits per token, the most recent tokens in FP16.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024. Published settings: 2 bits (4 is
the other width), groups of 32, a residual of 128 tokens.

When tokens leave the residual, as in the released code:

- Keys: of a prompt of l tokens the first l - (l mod ``residual``) are quantised; in generation the residual fills up
  and is quantised whole, after the step that brought its last token. A group is ``group`` successive tokens of one
  channel, counted from the first real token of a sequence, so that padding changes nothing.
- Values: the newest ``residual`` tokens are kept; each step quantises the one that falls out, after its attention. A
  group is ``group`` channels of one token; the last one is shorter where they do not divide head_dim.

A new token enters in FP16 and meets FP16 keys and values of at most ``residual`` tokens besides itself.

Deviations:

- Scales and zero points are rounded to FP16 so that nothing is clipped (see ``core.quantize``); KIVI's own rounding
  of them may clip the ends.
- The released code is for full-head attention; with grouped queries the cache is that of the KV heads.
- A model in bfloat16 keeps its residual in bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.baselines.columns import half_of, part_of, present_in, starts_of, to_half
from diffkv_repro.baselines.kivi_store import Packed, Simulated, round_trip, together
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.storages import require_storage
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.packing import packed_bytes
from diffkv_repro.models.hf import AttentionCall

_BITS = (2, 4)


@dataclass(frozen=True)
class Kivi(Method):
    """``bits`` for keys and values, ``group`` tokens or channels to a scale, ``residual`` recent tokens in FP16."""

    bits: int = 2
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits!r}; allowed are {', '.join(map(str, _BITS))}")
        if not isinstance(self.group, int) or self.group < 1:
            raise ValueError(f"group is {self.group!r}; it must be a whole number of at least 1")
        if not isinstance(self.residual, int) or self.residual < 1 or self.residual % self.group:
            raise ValueError(
                f"residual is {self.residual!r}; allowed are multiples of the group of {self.group} tokens"
            )

    @property
    def label(self) -> str:
        return f"KIVI {self.bits}-bit"

    def layer(self, place: Place, storage: str) -> LayerCache:
        require_storage(storage)
        return _KiviLayer(place, self, storage)


class _KiviLayer(LayerCache):
    """When what is quantised; the stores know how."""

    def __init__(self, place: Place, method: Kivi, storage: str) -> None:
        super().__init__(place)
        self._method = method
        self._kind = Packed if storage == "packed" else Simulated
        self._half = half_of(place.dtype)
        self._starts: list[int] = []
        self._columns = 0
        self._store: Simulated | Packed | None = None

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        call, residual = prompt.call, self._method.residual
        self._columns = prompt.tokens
        self._starts = starts_of(rows.padding, call.key.shape[0])
        self._store = self._kind(self._method, self.place.dtype, self._halved(call.key), self._halved(call.value))
        blocks = [(start, start + (prompt.tokens - start) // residual * residual) for start in self._starts]
        self._seal_keys(blocks)
        self._store.seal_values(0, max(0, prompt.tokens - residual))

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        count = call.query.shape[2]
        outputs, done = [], 0
        while done < count:
            # No key is quantised before one of the sequences has filled its residual: up to there all goes at once.
            free = min(self._method.residual - self._held(start) for start in self._starts)
            stop = min(count, done + free)
            outputs.append(self._run(part_of(call, done, stop)))
            done = stop
        self.reads += count
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    def kv_bytes(self, rows: Rows) -> KVBytes:
        method, layout = self._method, self.place.layout
        kv_heads, dim = layout.kv_heads, layout.head_dim
        tokens, keys, values = self._totals()
        window = 2 * kv_heads * dim * (2 * tokens - keys - values)
        codes = kv_heads * dim * (keys + values) * method.bits // 8
        scales = 4 * kv_heads * (keys // method.group * dim + values * self._value_groups)
        return KVBytes(
            payload=codes,
            scales=scales,
            window=window,
            padding=self._allocated() - codes - scales - window,
            full=4 * kv_heads * dim * tokens,
        )

    def select(self, rows: Tensor) -> None:
        self._store.select(rows)
        self._starts = [self._starts[row] for row in rows.tolist()]
        # The longest sequences may be gone, and the room that only they needed with them.
        self._store.trim(self._starts)

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        tokens, keys, values = self._totals()
        bits, kv_heads = self._method.bits, self.place.layout.kv_heads
        counts = {f"K{bits}V{bits}": values, f"K{bits}V16": keys - values, "K16V16": tokens - keys}
        return {name: [count] * kv_heads for name, count in counts.items()}

    def tensors(self) -> list[Tensor]:
        return self._store.tensors()

    def _run(self, call: AttentionCall) -> Tensor:
        """Attention of new tokens that fill no residual before the last of them."""
        count, residual = call.query.shape[2], self._method.residual
        before, self._columns = self._columns, self._columns + call.query.shape[2]
        self._store.append(self._halved(call.key), self._halved(call.value))
        key, value = self._store.view(self._starts)
        present = present_in(self._starts, self._columns, key.shape[1], key.device)
        output, weights = attend(call, key, value, present)
        first, last = max(0, before - residual), max(0, self._columns - residual)
        if count > 1 and last - 1 > first:
            # Later queries of the run meet values that fell out of the residual meanwhile: take the difference.
            fallen = value[:, :, first : last - 1]
            change = round_trip(fallen, self._method, "token") - fallen.float()
            column = torch.arange(first, last - 1, device=value.device)
            query = torch.arange(before, self._columns, device=value.device)
            seen = weights[..., first : last - 1] * (column < query[:, None] - residual)
            extra = torch.matmul(seen.flatten(2, 3), change).view(output.shape)
            output = (output.float() + extra).to(output.dtype)
        self._store.seal_values(first, last)
        if not all(map(self._held, self._starts)):
            self._seal_keys([(self._columns - (0 if self._held(s) else residual), self._columns) for s in self._starts])
        return output

    def _seal_keys(self, blocks: list[tuple[int, int]]) -> None:
        spans = together([(start, *block) for start, block in zip(self._starts, blocks, strict=True)])
        self._store.seal_keys([span for span in spans if span[3] > span[2]])
        self._store.trim(self._starts)

    def _held(self, start: int) -> int:
        """Keys in the residual of a sequence that starts in column ``start``."""
        return (self._columns - start) % self._method.residual

    def _quantised(self, start: int) -> tuple[int, int, int]:
        """Tokens of a sequence; how many of its keys, and of its values, are quantised."""
        tokens = self._columns - start
        return tokens, tokens - self._held(start), max(0, tokens - self._method.residual)

    def _totals(self) -> list[int]:
        return [sum(part) for part in zip(*map(self._quantised, self._starts), strict=True)]

    @property
    def _value_groups(self) -> int:
        return -(-self.place.layout.head_dim // self._method.group)

    def _allocated(self) -> int:
        """What the packed store holds: the longest sequence sets the size for all."""
        method, dim = self._method, self.place.layout.head_dim
        keys = max(self._quantised(start)[1] for start in self._starts)
        kept = max(map(self._held, self._starts))
        values = max(0, self._columns - method.residual)
        code = packed_bytes(dim, method.bits)
        size = keys * code + keys // method.group * dim * 4 + values * (code + 4 * self._value_groups)
        size += 2 * dim * (kept + self._columns - values)
        return len(self._starts) * self.place.layout.kv_heads * size

    def _halved(self, tensor: Tensor) -> Tensor:
        return to_half(tensor, self._half)
