"""vLLM's paged KV caches as keys and values [kv_heads, tokens, head_dim], and back. Needs no vLLM.

vLLM shows each layer's cache as [blocks, kv_heads, slots, 2 * head_dim]. On GPUs a slot's last dimension is its key and
then its value. On CPUs only the shape is the same: within a block and head the numbers lie as the processor's kernels
want them (keys transposed, or interleaved for AMX). That order is not written down anywhere, so it is asked for:
:func:`kernel_order` lets the kernel itself store numbered keys and values, and looks where they went.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from diffkv_repro.kvserve.layout import DTYPE_IDS, LayerKV

_DIGIT = 128  # whole numbers below it are exact in float16 and bfloat16
Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class PagedLayer:
    """One layer's cache, ``tensor`` [blocks, kv_heads, slots, 2 * head_dim], in the engine's own memory.

    ``order`` [2 * slots * head_dim] says where in a block and head each number is, keys [slots, head_dim] first and
    then values; None where every slot holds its key and then its value.
    """

    tensor: Tensor
    order: Tensor | None = None

    def __post_init__(self) -> None:
        shape, dtype = tuple(self.tensor.shape), self.tensor.dtype
        if len(shape) != 4 or shape[3] % 2:
            raise ValueError(f"a cache is {shape}; supported are [blocks, kv_heads, slots, 2 * head_dim]")
        if dtype not in DTYPE_IDS:
            names = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_IDS)
            raise ValueError(f"a cache is of {dtype}; supported are {names}, that is an unquantised KV cache")
        if self.order is not None and not torch.equal(self.order.sort().values, torch.arange(shape[2] * shape[3])):
            raise ValueError(f"order is no permutation of a block's {shape[2] * shape[3]} numbers")

    @property
    def slots(self) -> int:
        """Tokens of a block."""
        return self.tensor.shape[2]

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.tensor.shape[1]

    @property
    def head_dim(self) -> int:
        """Numbers of a key, and of a value."""
        return self.tensor.shape[3] // 2

    def read(self, blocks: Sequence[int], tokens: int) -> LayerKV:
        """The first ``tokens`` tokens of a request whose blocks are ``blocks``, copied to main memory."""
        index = self._index(blocks, 0, tokens)
        found = self.tensor[index] if self.order is None else self._plain(index)
        # [blocks, kv_heads, slots, 2 * head_dim] to [kv_heads, tokens, 2 * head_dim]
        joined = found.transpose(0, 1).flatten(1, 2)[:, :tokens].cpu()
        return LayerKV(*(half.contiguous() for half in joined.split(self.head_dim, dim=-1)))

    def write(self, blocks: Sequence[int], layer: LayerKV, start: int) -> None:
        """Put tokens ``start`` and after of ``layer`` [kv_heads, tokens, head_dim] where the request's belong.

        Slots of the same blocks before ``start`` and after the last token stay as they are.
        """
        tokens = layer.key.shape[1]
        index = self._index(blocks, start, tokens)
        first = start // self.slots * self.slots
        found = self.tensor[index] if self.order is None else self._plain(index)
        joined = torch.cat([layer.key[:, start:], layer.value[:, start:]], dim=-1).to(self.tensor)
        # A copy of the blocks is changed and put back: a slice of a block has no place of its own where it is permuted.
        flat = found.transpose(0, 1).flatten(1, 2).contiguous()
        flat[:, start - first : tokens - first] = joined
        changed = flat.unflatten(1, (len(index), self.slots)).transpose(0, 1)
        if self.order is None:
            self.tensor[index] = changed
        else:
            stored = torch.empty_like(self._flat(index))
            halves = changed.unflatten(3, (2, self.head_dim)).movedim(3, 2)
            stored[..., self.order] = halves.flatten(2)
            self.tensor[index] = stored.view(changed.shape)

    def _index(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """The blocks of tokens ``start`` to ``stop``."""
        if not 0 <= start < stop or stop > len(blocks) * self.slots:
            room = len(blocks) * self.slots
            raise ValueError(f"tokens {start} to {stop} were asked for; {len(blocks)} blocks hold {room}")
        chosen = torch.tensor(blocks[start // self.slots : -(-stop // self.slots)], device=self.tensor.device)
        if int(chosen.min()) < 0 or int(chosen.max()) >= self.tensor.shape[0]:
            raise ValueError(f"blocks {chosen.tolist()} were asked for; the cache has {self.tensor.shape[0]}")
        return chosen

    def _flat(self, index: Tensor) -> Tensor:
        return self.tensor[index].flatten(2)

    def _plain(self, index: Tensor) -> Tensor:
        """Blocks in the order of GPUs: [blocks, kv_heads, slots, key and value]."""
        halves = self._flat(index)[..., self.order].unflatten(2, (2, self.slots, self.head_dim))
        return halves.movedim(2, 3).flatten(3)


def kernel_order(store: Store, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Where the engine's own kernel puts each number of a block, as :class:`PagedLayer` takes it.

    ``store(key, value, cache, slot_mapping)`` writes keys and values [tokens, kv_heads, head_dim] to ``cache``
    [blocks, kv_heads, slots, 2 * head_dim], at the slots that ``slot_mapping`` [tokens] counts over all blocks. Raises
    ValueError where the numbers do not come out as a permutation, the same for all heads.
    """
    count = 2 * slots * head_dim
    numbers = torch.arange(count).view(2, slots, 1, head_dim).expand(2, slots, kv_heads, head_dim)
    found = torch.zeros(kv_heads, count, dtype=torch.int64)
    for digit in range(3):
        base = _DIGIT**digit
        key, value = (numbers // base % _DIGIT).to(dtype).contiguous()
        cache = torch.zeros(2, kv_heads, slots, 2 * head_dim, dtype=dtype)
        store(key, value, cache, torch.arange(slots, 2 * slots))  # the second block, so that an offset shows
        found += cache[1].flatten(1).to(torch.int64) * base
    order = found[0].argsort()
    if not torch.equal(found, torch.arange(count)[order.argsort()].expand_as(found)):
        raise ValueError("the engine's kernel did not store numbered keys and values as a permutation of them")
    return order


def in_model_order(caches: Mapping[str, Tensor]) -> list[Tensor]:
    """Caches from the first layer to the last, by the numbers in their names; one that layers share comes once.

    Raises ValueError for caches of more than one shape or dtype: a frame has layers that are alike.
    """
    if not caches:
        raise ValueError("the engine has no KV caches; there is nothing to transfer")

    def place(name: str) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", name)]

    own: dict[int, Tensor] = {}
    for name in sorted(caches, key=place):
        own.setdefault(caches[name].data_ptr(), caches[name])
    ordered = list(own.values())
    for before, after in pairwise(ordered):
        if before.shape[1:] != after.shape[1:] or before.dtype != after.dtype:
            shapes = f"{tuple(before.shape[1:])} {before.dtype} and {tuple(after.shape[1:])} {after.dtype}"
            raise ValueError(f"layers have caches of {shapes}; supported are models whose layers are alike")
    return ordered
