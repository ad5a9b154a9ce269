"""Names of prompts: digests of their tokens, whole and block by block."""

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_digest(ids: Sequence[int]) -> str:
    """32 hexadecimal digits that name these tokens."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).hexdigest()[:32]


def block_digests(ids: Sequence[int], block: int) -> list[str]:
    """A digest for each whole block of ``block`` tokens, of that block and all before it."""
    hashed, found = hashlib.sha256(), []
    tokens = np.asarray(ids, dtype="<u4")
    for end in range(block, len(tokens) + 1, block):
        hashed.update(tokens[end - block : end].tobytes())
        found.append(hashed.hexdigest()[:32])
    return found
