import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def poisoned():
    """New tensors hold NaN or -1, so that an element that a kernel does not write shows."""
    empty = torch.empty

    def filled(*args, **options):
        tensor = empty(*args, **options)
        tensor.flatten().view(torch.uint8).fill_(0xFF)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", filled)
        yield
