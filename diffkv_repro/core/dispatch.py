"""Where an operation runs that exists as a kernel and as its torch twin."""

import os

from torch import Tensor


def uses_triton(tensor: Tensor) -> bool:
    """Whether an operation on ``tensor`` runs as a Triton kernel."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
