"""Identity of the code that a kept result depends on, so that no result outlives the code that made it."""

import hashlib
from functools import cache
from pathlib import Path

_COMPRESSED_CACHE = (
    "attention_stats/*",
    "baselines/*",
    "cache/*",
    "core/hadamard",
    "core/packing",
    "core/precision",
    "core/quantize",
    "core/vectors",
    "diffkv/policy",
    "diffkv/rules",
    "models/*",
)


@cache
def code_digest(*modules: str) -> str:
    """Of the compressed cache and all below it, and of ``modules`` as ``evaluation/generation``.

    Raises ValueError for a module that is not there.
    """
    package = Path(__file__).resolve().parents[1]
    found = []
    for pattern in (*_COMPRESSED_CACHE, *modules):
        files = sorted(package.glob(f"{pattern}.py"))
        if not files:
            raise ValueError(f"{pattern} names no module of {package.name}")
        found += files
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()
