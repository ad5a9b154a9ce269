"""What happens to keys before they are quantised and is undone, exactly, when they are used."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from diffkv_repro.models.rope import Rope


class KeyTransform(ABC):
    """A change of keys [batch, kv_heads, tokens, head_dim] at ``positions`` [batch, tokens]."""

    @abstractmethod
    def forward(self, key: Tensor, positions: Tensor) -> Tensor:
        """Keys as they are to be quantised."""

    @abstractmethod
    def inverse(self, key: Tensor, positions: Tensor) -> Tensor:
        """Keys as attention wants them, from dequantised ones."""


class BiasFree(KeyTransform):
    """Take out the rotated bias of the key projection (ours; in neither paper).

    A Qwen-type model adds the same large vector to every key before RoPE. It says nothing about the token, but it sets
    the range that the quantiser has to cover. ``RoPE(bias, position)`` is known without any data, so subtracting it
    is exact and stores nothing.
    """

    def __init__(self, bias: Tensor, rope: Rope) -> None:
        self._bias = bias
        self._rope = rope
        self._table = bias.new_empty(bias.shape[0], 0, bias.shape[1])

    def forward(self, key: Tensor, positions: Tensor) -> Tensor:
        return (key.float() - self._rotated(positions)).to(key.dtype)

    def inverse(self, key: Tensor, positions: Tensor) -> Tensor:
        return (key.float() + self._rotated(positions)).to(key.dtype)

    def _rotated(self, positions: Tensor) -> Tensor:
        """RoPE(bias, position), [batch, kv_heads, tokens, head_dim], from a table that all requests share."""
        longest = int(positions.max()) + 1 if positions.numel() else 0
        known = self._table.shape[1]
        if longest > known:
            new = torch.arange(known, max(longest, 2 * known, 256), device=self._bias.device)
            repeated = self._bias[None, :, None].expand(1, -1, len(new), -1)
            self._table = torch.cat([self._table, self._rope.rotate(repeated, new[None])[0]], dim=1)
        if len(positions) == 1:
            return self._table[:, positions[0]][None]
        return self._table[:, positions].transpose(0, 1)


class Unrotated(KeyTransform):
    """Undo RoPE, so that a channel means the same at every position (KVQuant quantises keys before RoPE)."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope

    def forward(self, key: Tensor, positions: Tensor) -> Tensor:
        return self._rope.rotate(key, positions, back=True).to(key.dtype)

    def inverse(self, key: Tensor, positions: Tensor) -> Tensor:
        return self._rope.rotate(key, positions).to(key.dtype)
