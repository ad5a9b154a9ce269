"""The part of :mod:`diffkv_repro.models.hf` that stands between transformers' cache and ours.

transformers asks a cache layer for the keys and values to attend over. Ours hands back the new ones alone: the
attention function, which is ours too, knows where the others are.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from diffkv_repro.models.hf import decoder_of, intercepting

# transformers up to 5.23 calls the argument past_key_values, from 5.24 on cache.
_NAMES = ("past_key_values", "cache")


class CacheLayer(CacheLayerMixin):
    """One layer of a transformers cache whose tokens are kept by ``owner``.

    ``on_select`` is called with the sequences to keep, in order, when beams are reordered.
    """

    is_croppable = False

    def __init__(self, owner: Any, on_select: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.owner = owner
        self._on_select = on_select
        self.columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not intercepting():
            raise RuntimeError("a compressed cache was used outside its compress() block, where nobody reads it")
        self.is_initialized = True
        self.columns += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise NotImplementedError("a compressed cache is of one request; make a new one")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("a compressed cache cannot take tokens back (assisted generation needs that)")

    def offload(self) -> None:
        raise NotImplementedError("a compressed cache is not offloaded")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._on_select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._on_select(indices if indices.dtype != torch.bool else indices.nonzero().flatten())

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("repeat the inputs instead: a compressed cache is not multiplied")


@contextmanager
def watch_calls(model: PreTrainedModel, on_call: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Let ``on_call`` see, and change, the keyword arguments of every call of the decoder inside the block."""

    def hook(_module, args, kwargs):
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        return (), on_call(kwargs | dict(zip(names, args, strict=False)))

    decoder = decoder_of(model)
    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def cache_argument(kwargs: dict[str, Any]) -> str:
    """What this version of transformers calls the cache in ``kwargs``."""
    return next((name for name in _NAMES if name in kwargs), _NAMES[0])


def uses_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether a call with ``kwargs`` would keep a cache."""
    given = kwargs.get("use_cache")
    return bool(model.config.get_text_config().use_cache if given is None else given)


def owner_of(cache: Cache | None) -> Any:
    """Who keeps the tokens of ``cache``: None unless it consists of :class:`CacheLayer`."""
    first = cache.layers[0] if cache is not None and cache.layers else None
    return first.owner if isinstance(first, CacheLayer) else None


def make_cache(layers: list[CacheLayer]) -> Cache:
    """A transformers cache of ``layers``."""
    return Cache(layers=layers)


def take_over(cache: Cache, layers: list[CacheLayer]) -> None:
    """Put ``layers`` in place of those of ``cache``. Raises ValueError where it holds tokens or has a fixed shape."""
    if not isinstance(cache, DynamicCache) or cache.get_seq_length():
        raise ValueError(
            f"the model was given a {type(cache).__name__} with {cache.get_seq_length()} tokens; inside compress() "
            "only a new, empty DynamicCache (or none) can be turned into a compressed cache"
        )
    cache.layers = layers
    cache.layer_class_to_replicate = None


def left_padding(attention_mask: Any, columns: int) -> Tensor | None:
    """Columns of padding on the left of each sequence, [batch]; None without any.

    Raises ValueError for a mask that hides anything else: a compressed cache has no place for it.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or attention_mask.shape[1] != columns:
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask is {what}; it must be [batch, {columns}]")
    valid = attention_mask.bool()
    if bool(valid.all()):
        return None
    if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        raise ValueError("attention_mask hides tokens after others; only padding on the left is supported")
    if not bool(valid[:, -1].all()):
        raise ValueError("attention_mask hides a whole sequence: every prompt needs at least one token")
    return columns - valid.sum(dim=1)
