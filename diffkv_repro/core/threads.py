"""How many threads the CPU gives to a step of generation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch inside the block.

    A decoding step is hundreds of operations on small tensors. Threads that share each of them wait for one another
    more than they work, ten times so on a machine that is busy with something else.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
