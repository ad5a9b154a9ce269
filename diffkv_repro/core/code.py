"""Identity of the code that a kept result depends on."""

import hashlib
from functools import cache
from pathlib import Path


@cache
def modules_digest(*patterns: str) -> str:
    """SHA-256 of the sources of modules, as ``kvserve/*`` or ``core/packing``.

    Raises ValueError for a pattern that names none.
    """
    package = Path(__file__).resolve().parents[1]
    found = []
    for pattern in patterns:
        files = sorted(package.glob(f"{pattern}.py"))
        if not files:
            raise ValueError(f"{pattern} names no module of {package.name}")
        found += files
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()
