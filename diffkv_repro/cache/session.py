"""``compress``: let a transformers model keep its keys and values compressed."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.layer import FullLayer, LayerCache, Place, Rows
from diffkv_repro.cache.method import Method, model_dtype
from diffkv_repro.cache.storages import require_storage
from diffkv_repro.core.accounting import KVBytes
from diffkv_repro.models.hf import (
    AttentionCall,
    UnsupportedAttention,
    attention_layout,
    intercept_attention,
    intercepting,
)
from diffkv_repro.models.hf_cache import (
    CacheLayer,
    cache_argument,
    left_padding,
    make_cache,
    owner_of,
    take_over,
    uses_cache,
    watch_calls,
)
from diffkv_repro.models.rope import Rope, key_biases

logger = logging.getLogger("diffkv_repro")


class CompressedCache:
    """The compressed cache of one batch of requests: one :class:`LayerCache` a layer, and what they share.

    ``hf`` is the object to hand to transformers as its cache.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self.layers = list(layers)
        self.rows: Rows | None = None
        # Every layer of transformers' cache reports a new order of the sequences; the first one stands for all.
        self._shims = [CacheLayer(self, self._select if index == 0 else _ignore) for index in range(len(self.layers))]
        self.hf = make_cache(self._shims)

    @property
    def columns(self) -> int:
        """Tokens seen, padding included."""
        return self._shims[0].columns

    @property
    def reads(self) -> int:
        """Queries that were answered from the cache, summed over layers; 0 means that nothing tested it."""
        return sum(layer.reads for layer in self.layers)

    def kv_bytes(self) -> KVBytes:
        """What the cache occupies now, all layers and sequences."""
        return sum((layer.kv_bytes(self.rows) for layer in self.layers), KVBytes())

    def tier_counts(self) -> list[dict[str, list[int]]]:
        """For each layer the stored tokens by precision, one number a KV head."""
        return [layer.tier_counts(self.rows) for layer in self.layers]

    def tokens(self) -> Counter[str]:
        """Stored tokens by precision, and ``pruned``, over the heads and sequences of layers with full attention."""
        total: Counter[str] = Counter()
        layout = self.layers[0].place.layout
        full = [layer for layer in self.layers if layout.layers[layer.place.layer].kind == "full"]
        for layer in full:
            for name, counts in layer.tier_counts(self.rows).items():
                total[name] += sum(counts)
        batch, columns = self.rows.positions.shape
        seen = batch * columns - (0 if self.rows.padding is None else int(self.rows.padding.sum()))
        total["pruned"] = seen * layout.kv_heads * len(full) - sum(total.values())
        return total

    def admit(self, prompts: Sequence[PromptAttention], rows: Rows) -> None:
        """Store a prompt whose attention was computed elsewhere, layer by layer (to compare methods on one prompt)."""
        self.rows = rows
        for layer, shim, prompt in zip(self.layers, self._shims, prompts, strict=True):
            layer.prefill(prompt, rows)
            shim.columns = prompt.tokens

    def take_over(self, given: Any) -> None:
        """Stand in for the cache that transformers made itself, which it goes on to use."""
        take_over(given, self._shims)
        self.hf = given

    def extend(self, kwargs: dict[str, Any]) -> None:
        """Take note of the padding and the positions of the tokens that a model call brings."""
        batch, count = _shape(kwargs)
        device, past = self.layers[0].place.device, self.columns
        padding = left_padding(kwargs.get("attention_mask"), past + count)
        if past and kwargs.get("attention_mask") is None:
            padding = self.rows.padding
        new = kwargs.get("position_ids")
        if new is None:
            new = torch.arange(past, past + count, device=device)[None]
        new = new.to(device).expand(batch, count)
        positions = new if past == 0 else torch.cat([self.rows.positions, new], dim=1)
        self.rows = Rows(None if padding is None else padding.to(device), positions)

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention of one layer: exact for the prompt, from the cache for what follows."""
        layer = self.layers[call.layer]
        if self._shims[call.layer].columns > call.query.shape[2]:
            return layer.decode(call, self.rows)
        prompt = PromptAttention(call, self.rows.padding)
        layer.prefill(prompt, self.rows)
        return prompt.output()

    def _select(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.select(rows.to(layer.place.device))
        padding = self.rows.padding
        self.rows = Rows(None if padding is None else padding[rows], self.rows.positions[rows])


class Session:
    """What ``with compress(...) as session`` gives: the plan, and the cache of the latest request."""

    def __init__(self, model: PreTrainedModel, method: Method, storage: str) -> None:
        require_storage(storage)
        self.method = method
        self.storage = storage
        self.layout = attention_layout(model)
        kinds = {layer.kind for layer in self.layout.layers}
        if "full" not in kinds:
            raise UnsupportedAttention(
                f"every layer of {type(model).__name__} slides over {self.layout.layers[0].window} tokens: there is "
                "nothing left to compress"
            )
        method.check(self.layout)
        self.plan = [f"layer {index}: {text}" for index, text in enumerate(method.plan(self.layout))]
        if len(kinds) > 1:
            logger.warning("%s compresses its full-attention layers only:\n%s", method.label, "\n".join(self.plan))
        self._model = model
        wanted = method.needs_bias or method.needs_rope
        self._rope = Rope(model) if wanted else None
        self._biases = key_biases(model) if method.needs_bias else [None] * len(self.layout.layers)
        if method.needs_bias and all(bias is None for bias in self._biases):
            raise ValueError(f"bias-free keys are asked for, but the keys of {type(model).__name__} have no bias")
        self.cache: CompressedCache | None = None
        self._uncached: Tensor | None = None
        self._in_use: CompressedCache | None = None

    def new_cache(self) -> CompressedCache:
        """An empty cache, also to be handed to the model as ``past_key_values=cache.hf``."""
        dtype, device = model_dtype(self._model.dtype), self._model.device
        layers = []
        for index, (attention, bias) in enumerate(zip(self.layout.layers, self._biases, strict=True)):
            place = Place(index, self.layout, dtype, device, self._rope, bias)
            full = attention.kind == "full"
            layers.append(self.method.layer(place, self.storage) if full else FullLayer(place))
        return CompressedCache(layers)

    def on_call(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Before a call of the decoder: find, or make, the cache it is to use."""
        _, count = _shape(kwargs)
        if count == 0:
            raise ValueError("an empty prompt: at least one token is needed")
        name = cache_argument(kwargs)
        given = kwargs.get(name)
        if given is None and not uses_cache(self._model, kwargs):
            self._in_use, self._uncached = None, left_padding(kwargs.get("attention_mask"), count)
            return kwargs
        cache = owner_of(given)
        if cache is None:
            cache = self.new_cache()
            if given is not None:
                cache.take_over(given)
        limit = self.layout.max_positions
        if limit is not None and cache.columns + count > limit:
            raise ValueError(f"{cache.columns + count} tokens are more than the model's context of {limit}")
        cache.extend(kwargs)
        self.cache = self._in_use = cache
        return kwargs | {name: cache.hf}

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention of one layer. No gradients: what is stored is a constant."""
        with torch.no_grad():
            if self._in_use is not None:
                return self._in_use.attend(call)
            return PromptAttention(call, self._uncached).output()


@contextmanager
def compress(model: PreTrainedModel, method: Method, *, storage: str = "packed") -> Iterator[Session]:
    """Keep the KV cache of ``model`` compressed by ``method`` inside the block.

    ``model.generate`` (greedy, sampling, beam search, left-padded batches) and plain calls with a cache work as
    always; each request gets a cache of its own. ``storage`` is ``packed`` (real bytes) or ``simulated`` (the same
    numbers bit for bit, quicker, bytes counted only). Layers with a sliding window stay in full precision; the plan
    is then logged. Raises UnsupportedAttention or ValueError, before anything runs, where model and method do not fit.
    """
    if intercepting():
        raise ValueError("compress() inside another block that computes the attention itself: close that one first")
    session = Session(model, method, storage)
    with intercept_attention(model, session.attend), watch_calls(model, session.on_call):
        yield session


def _shape(kwargs: dict[str, Any]) -> tuple[int, int]:
    given = kwargs.get("input_ids")
    tensor = kwargs["inputs_embeds"] if given is None else given
    return tensor.shape[0], tensor.shape[1]


def _ignore(_rows: Tensor) -> None:
    pass
