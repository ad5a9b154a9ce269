"""Which share of a model a worker holds, and the sums that put the shares together (DiffKV Figure 7)."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Shards:
    """Worker ``rank`` of ``size``: tensor parallelism by heads and by rows of the MLP.

    ``data`` sums activations (NCCL on GPUs, gloo on CPUs), ``control`` agrees on what the host decides (gloo): both are
    groups of torch.distributed, None for a single worker.
    """

    rank: int = 0
    size: int = 1
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be from 0 to {self.size - 1}")
        if self.size > 1 and (self.data is None or self.control is None):
            raise ValueError(f"{self.size} workers need process groups; see Shards.join")

    @classmethod
    def join(cls) -> "Shards":
        """This process among those that torch.distributed connects; it must have been initialised."""
        control = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, control)

    def share(self, name: str, count: int) -> slice:
        """This worker's part of ``count`` of something; ValueError where they cannot be shared out evenly."""
        if count % self.size:
            raise ValueError(f"{count} {name} cannot be split over {self.size} workers")
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def add(self, partial: Tensor) -> Tensor:
        """The sum of every worker's ``partial``, in place."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.data)
        return partial

    def all_agree(self, yes: bool) -> bool:
        """Whether every worker says yes: their pages differ, and they must do the same."""
        if self.size == 1:
            return yes
        vote = torch.tensor([int(yes)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.control)
        return bool(vote)
