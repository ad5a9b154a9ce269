"""What the quantisers with a cache of their own share: growing tensors, FP16 windows, parts of a call."""

from dataclasses import replace

import torch
from torch import Tensor

from diffkv_repro.core.quantize import require_half_range
from diffkv_repro.models.hf import AttentionCall


class Columns:
    """A tensor [batch, kv_heads, columns, width] that grows by columns, in steps that keep appending linear."""

    def __init__(self, first: Tensor) -> None:
        # A copy: what is given may be the model's own tensor, and columns are written to later.
        self._data = first.clone(memory_format=torch.contiguous_format)
        self._used = first.shape[2]

    @property
    def tensor(self) -> Tensor:
        """A view of what is there; writing to it changes it."""
        return self._data[:, :, : self._used]

    def append(self, new: Tensor) -> None:
        """Add columns on the right."""
        start, stop = self._used, self._used + new.shape[2]
        missing = stop - self._data.shape[2]
        if missing > 0:
            room = max(missing, self._data.shape[2] // 2, 64)
            self._data = torch.nn.functional.pad(self._data, (0, 0, 0, room))
        self._data[:, :, start:stop] = new
        self._used = stop

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order."""
        self._data = self._data.index_select(0, rows)


def half_of(dtype: torch.dtype) -> torch.dtype:
    """In which 16 bits a model of ``dtype`` keeps what is not quantised."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def to_half(tensor: Tensor, half: torch.dtype) -> Tensor:
    """``tensor`` in ``half``. Raises ValueError for what FP16 cannot hold."""
    if tensor.numel():
        require_half_range(*(extreme.float() for extreme in torch.aminmax(tensor, dim=-1)))
    return tensor.to(half)


def part_of(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """The new tokens from ``start`` to ``stop`` of a call."""
    if start == 0 and stop == call.query.shape[2]:
        return call
    query, key, value = (tensor[:, :, start:stop] for tensor in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def starts_of(padding: Tensor | None, batch: int) -> list[int]:
    """Column of the first token of each sequence."""
    return [0] * batch if padding is None else padding.tolist()


def present_in(starts: list[int], columns: int, kv_heads: int, device: torch.device) -> Tensor | None:
    """Columns that hold a token, bool [batch, kv_heads, columns]; None where all do."""
    if not any(starts):
        return None
    first = torch.tensor(starts, device=device)[:, None]
    return (torch.arange(columns, device=device) >= first)[:, None].expand(-1, kv_heads, -1)
