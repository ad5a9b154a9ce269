"""Quest (Tang et al., ICML 2024, arXiv:2406.10774): everything is kept, and each query reads a few pages of it.

The cache is cut into pages. For each page the least and the greatest value of every key channel are kept, which bound
the score that any of its keys can have with a query. A generation step reads the pages with the highest bounds within
its budget of tokens. The prompt is attended to exactly.

Defaults: pages of 16 tokens; the first two layers, whose attention is spread out, read everything. The paper sets
budgets in tokens (``budget``); ``keep`` is a share of the tokens so far, as DiffKV states it (50 %, and 25 % on
LongBench). What is called Quest's memory there is the share that is read: the cache itself takes more than FP16 does,
by its summaries. :class:`QuestLayer` counts both.

Deviations:

- The query heads of a KV head share one choice, by the highest bound among them. The released code is of models with a
  KV head for each query head, or repeats keys and values.
- The newest page, which holds the query's own token, is always read and is part of the budget, as in the released
  kernels; the released evaluation code lets it compete with the others. From the latter comes the least of 3 pages.
- A sequence's pages start with its first token, padding apart, so that a padded batch reads what each would read alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import LayerCache, Place, Rows
from diffkv_repro.cache.method import Method
from diffkv_repro.cache.storages import require_storage
from diffkv_repro.cache.store import CHUNK
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.core.vectors import VectorCodec
from diffkv_repro.models.hf import AttentionCall, AttentionLayout

LEAST_PAGES = 3


@dataclass(frozen=True)
class Quest(Method):
    """Each query reads ``keep`` of the tokens so far, or ``budget`` tokens where that is given, in whole pages.

    ``page`` tokens to a page; the first ``dense_layers`` layers read everything.
    """

    keep: float = 0.5
    budget: int | None = None
    page: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; allowed are 0 to 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget is {self.budget}; allowed are whole numbers from 1, or None")
        if self.page < 1:
            raise ValueError(f"page is {self.page}; it must be at least 1")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers is {self.dense_layers}; it must be at least 0")

    @property
    def label(self) -> str:
        return f"Quest {self.keep * 100:g} %" if self.budget is None else f"Quest {self.budget} tokens"

    def plan(self, layout: AttentionLayout) -> list[str]:
        lines = super().plan(layout)
        for index, layer in enumerate(layout.layers[: self.dense_layers]):
            if layer.kind == "full":
                lines[index] = f"{self.label}: dense, everything is read"
        return lines

    def layer(self, place: Place, storage: str) -> LayerCache:
        require_storage(storage)
        return QuestLayer(place, self, storage)

    def pages(self, tokens: Tensor) -> Tensor:
        """Pages that fit the budget of a query which sees ``tokens`` tokens; the newest, not always full, is one."""
        newest = (tokens - 1) % self.page + 1
        budget = (tokens.double() * self.keep).round().long() if self.budget is None else self.budget
        return (1 + (budget - newest) // self.page).clamp_min(LEAST_PAGES)


class QuestLayer(LayerCache):
    """Keys and values in 16 bits, each sequence from slot 0 on, and the extremes of every page's keys.

    ``loaded_tokens`` counts the tokens that queries have read, over steps, sequences and KV heads; ``held_tokens``
    those that they would have read with full attention. Both storages hold the same tensors; ``packed`` shows them.
    """

    def __init__(self, place: Place, method: Quest, storage: str) -> None:
        super().__init__(place)
        self._method = method
        self._storage = storage
        self._sparse = place.layer >= method.dense_layers
        half = torch.bfloat16 if place.dtype == torch.bfloat16 else torch.float16
        self._codec = VectorCodec(place.layout.head_dim, 16, half=half)
        self._loaded = self._seen = torch.zeros((), dtype=torch.long, device=place.device)
        self._length = self._key = self._value = self._low = self._high = None

    def prefill(self, prompt: PromptAttention, rows: Rows) -> None:
        key = prompt.call.key
        self._length = torch.zeros(len(key), dtype=torch.long, device=key.device)
        self._key = key.new_empty(*key.shape[:2], 0, key.shape[3], dtype=self._codec.half)
        self._value, self._low, self._high = (torch.empty_like(self._key) for _ in range(3))
        valid = prompt.valid
        if valid is None:
            valid = torch.ones(len(key), prompt.tokens, dtype=torch.bool, device=key.device)
        self._append(key, prompt.call.value, valid)

    def decode(self, call: AttentionCall, rows: Rows) -> Tensor:
        batch, _, count, _ = call.query.shape
        own = self._length[:, None] + torch.arange(count, device=self._length.device)
        self._append(call.key, call.value, torch.ones(batch, count, dtype=torch.bool, device=own.device))
        read = torch.arange(self._key.shape[2], device=own.device) <= own[:, None, :, None]
        if self._sparse:
            # Below a query's own page all pages are full, so their summaries are what they were when it came: many
            # tokens at once read what they would read one by one.
            pages = self._chosen_pages(call.query, own)
            read = read & pages.repeat_interleave(self._method.page, dim=-1)
        kv_heads = self._key.shape[1]
        self._loaded = self._loaded + read.sum() * (kv_heads // read.shape[1])
        self._seen = self._seen + (own + 1).sum() * kv_heads
        self.reads += count
        return self._attended(call, read)

    def kv_bytes(self, rows: Rows) -> KVBytes:
        _, kv_heads, _, dim = self._key.shape
        held = int(self._length.sum())
        payload = 4 * kv_heads * dim * held
        tables = 0
        if self._sparse:
            tables = 4 * kv_heads * dim * int((-(-self._length // self._method.page)).sum())
        allocated = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())
        return KVBytes(payload=payload, tables=tables, padding=allocated - payload - tables, full=payload)

    def select(self, rows: Tensor) -> None:
        for name in ("_length", "_key", "_value", "_low", "_high"):
            setattr(self, name, getattr(self, name).index_select(0, rows))

    def tier_counts(self, rows: Rows) -> dict[str, list[int]]:
        return {"K16V16": [int(self._length.sum())] * self._key.shape[1]}

    def tensors(self) -> list[Tensor]:
        return self._tensors() if self._storage == "packed" else []

    @property
    def loaded_tokens(self) -> int:
        """Tokens read by all queries so far, one for each KV head."""
        return int(self._loaded)

    @property
    def held_tokens(self) -> int:
        """Tokens that the same queries would have read with full attention."""
        return int(self._seen)

    def _tensors(self) -> list[Tensor]:
        return [self._key, self._value, self._low, self._high]

    def _append(self, key: Tensor, value: Tensor, valid: Tensor) -> None:
        """Store ``key``, ``value`` [batch, kv_heads, n, head_dim] where ``valid`` [batch, n]; update pages."""
        slots = self._length[:, None] + valid.cumsum(dim=1) - 1
        first = int(self._length.min()) // self._method.page
        self._length = self._length + valid.sum(dim=1)
        self._reserve(int(self._length.max()))
        row, column = valid.nonzero(as_tuple=True)
        slot = slots[row, column]
        self._key[row, :, slot] = self._codec.round_trip(key, self._codec.half)[row, :, column]
        self._value[row, :, slot] = self._codec.round_trip(value, self._codec.half)[row, :, column]
        if not self._sparse:
            return
        page = self._method.page
        changed = self._key[:, :, first * page :].unflatten(2, (-1, page))
        slot = torch.arange(first * page, self._key.shape[2], device=key.device).view(-1, page)
        empty = (slot >= self._length[:, None, None])[:, None, ..., None]
        self._low[:, :, first:] = changed.masked_fill(empty, torch.inf).amin(dim=3)
        self._high[:, :, first:] = changed.masked_fill(empty, -torch.inf).amax(dim=3)

    def _reserve(self, slots: int) -> None:
        """Room for ``slots`` tokens in whole pages, at least CHUNK tokens more where there is none left."""
        missing = slots - self._key.shape[2]
        if missing <= 0:
            return
        pages = -(-max(missing, CHUNK) // self._method.page)
        pad = torch.nn.functional.pad
        self._key, self._value = (pad(t, (0, 0, 0, pages * self._method.page)) for t in (self._key, self._value))
        if self._sparse:
            self._low, self._high = (pad(t, (0, 0, 0, pages)) for t in (self._low, self._high))

    def _chosen_pages(self, query: Tensor, own: Tensor) -> Tensor:
        """Pages read, bool [batch, kv_heads, n, pages], by queries in slots ``own`` [batch, n]."""
        batch, kv_heads, pages, dim = self._low.shape
        query = query.float().reshape(batch, kv_heads, -1, dim)
        bound = query.clamp_min(0) @ self._high.float().transpose(-1, -2)
        bound += query.clamp_max(0) @ self._low.float().transpose(-1, -2)
        bound = bound.view(batch, kv_heads, -1, own.shape[1], pages).amax(dim=2)
        page = torch.arange(pages, device=own.device)
        newest = (own // self._method.page)[:, None, :, None]
        # What is not older than the newest page may be empty, and its bound not a number.
        order = bound.masked_fill(page >= newest, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, page.expand_as(order))
        others = self._method.pages(own + 1)[:, None, :, None] - 1
        return (rank < others) & (page < newest) | (page == newest)

    def _attended(self, call: AttentionCall, read: Tensor) -> Tensor:
        """Attention over the tokens ``read``, bool [batch, kv_heads or 1, n, slots]."""
        batch, heads, count, dim = call.query.shape
        kv_heads, slots = self._key.shape[1:3]
        query = call.query.float().reshape(batch, kv_heads, -1, dim)
        scores = torch.matmul(query, self._key.float().transpose(-1, -2)).mul_(call.scale)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch, kv_heads, heads // kv_heads, count, slots)
        weights = scores.masked_fill_(~read[:, :, None], -torch.inf).softmax(dim=-1)
        output = torch.matmul(weights.view(batch, kv_heads, -1, slots), self._value.float())
        return output.view(batch, heads, count, dim).to(call.query.dtype)
