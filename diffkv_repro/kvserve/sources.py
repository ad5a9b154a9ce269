"""Where the KV cache of a prompt comes from: a model's prefill, or numbers made up for tests of the transfer."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.heads import score_heads
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.prefill import prefill
from diffkv_repro.kvserve.quality import Continuation
from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.models.zoo import LoadedModel


@dataclass(frozen=True)
class Computed:
    """The cache of a prompt, the ``seconds`` its prefill took, and what profiles need beside it."""

    kv: KV
    seconds: float
    assets: Assets = field(default_factory=Assets)


class Source(Protocol):
    """Computes caches of one ``layout``."""

    layout: KVLayout

    def compute(self, ids: Sequence[int]) -> Computed: ...

    def extend(self, kv: KV, ids: Sequence[int]) -> KV: ...


class _Kept:
    """Caches of the last prompts, with the seconds that they took at first. One at a time is computed, as on a GPU."""

    def __init__(self, most: int) -> None:
        require_whole("kept", most, 0)
        self._most = most
        self._kept: OrderedDict[tuple[int, ...], Computed] = OrderedDict()
        self.one = threading.Lock()

    def get(self, ids: tuple[int, ...], compute: Callable[[tuple[int, ...]], Computed]) -> Computed:
        with self.one:
            found = self._kept.pop(ids, None) or compute(ids)
            if self._most:
                self._kept[ids] = found
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            return found


class ModelSource:
    """Prefill by a model. Caches of the last ``kept`` prompts stay in memory.

    ``head_text`` is what attention heads are ranked on, once, for profiles with a ladder of heads.
    """

    def __init__(
        self, loaded: LoadedModel, *, dtype: torch.dtype = torch.float16, kept: int = 2, head_text: str | None = None
    ) -> None:
        self.loaded, self.layout = loaded, KVLayout.of(loaded, dtype)
        self._dtype, self._kept = dtype, _Kept(kept)
        self._assets = Assets() if head_text is None else Assets(heads=score_heads(loaded, [head_text]))

    def compute(self, ids: Sequence[int]) -> Computed:
        """Run the model. Raises ValueError for ids that are none of its tokens."""
        own = tuple(map(int, ids))
        most = self.loaded.model.config.get_text_config().vocab_size
        if not own or max(own) >= most or min(own) < 0:
            raise ValueError(f"ids of {len(own)} tokens up to {max(own, default=0)}; the vocabulary has {most}")
        return self._kept.get(own, self._prefill)

    def extend(self, kv: KV, ids: Sequence[int]) -> KV:
        """The cache of all of ``ids``, of which ``kv`` holds the first; only the others are computed."""
        with self._kept.one, one_thread():
            going = Continuation(self.loaded, kv)
            going.step(torch.tensor([list(map(int, ids[kv.tokens :]))]))
            return going.kv(self._dtype)

    def _prefill(self, ids: tuple[int, ...]) -> Computed:
        started = time.perf_counter()
        with one_thread():
            kv = prefill(self.loaded, torch.tensor([ids]), dtype=self._dtype).kv
        return Computed(kv, time.perf_counter() - started, self._assets)


class MadeUpSource:
    """Caches of random numbers that depend on the tokens alone, so that two processes make the same.

    As in a real cache, a prefix of the tokens has the same numbers. A token's prefill takes ``seconds`` (a sleep).
    """

    def __init__(self, layout: KVLayout, *, seconds: float = 0.0, kept: int = 2) -> None:
        self.layout, self._seconds, self._kept = layout, seconds, _Kept(kept)

    def compute(self, ids: Sequence[int]) -> Computed:
        """Keys and values [kv_heads, tokens, head_dim] of every layer."""
        return self._kept.get(tuple(map(int, ids)), self._make)

    def extend(self, kv: KV, ids: Sequence[int]) -> KV:
        """The cache of all of ``ids``, of which ``kv`` holds the first."""
        rest = self._make(tuple(map(int, ids[kv.tokens :]))).kv
        pairs = zip(kv.pairs, rest.pairs, strict=True)
        return KV.of([tuple(torch.cat(parts, dim=1) for parts in zip(*two, strict=True)) for two in pairs])

    def _make(self, ids: tuple[int, ...]) -> Computed:
        layout, started = self.layout, time.perf_counter()
        time.sleep(self._seconds * len(ids))
        shape = (2 * layout.layers, layout.kv_heads, layout.head_dim)
        columns = [torch.randn(shape, generator=torch.Generator().manual_seed(one)) for one in ids]
        both = torch.stack(columns, dim=2).to(layout.dtype)
        pairs = [(both[2 * layer], both[2 * layer + 1]) for layer in range(layout.layers)]
        return Computed(KV.of(pairs), time.perf_counter() - started)
