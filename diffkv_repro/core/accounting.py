"""``KVBytes``: what a compressed cache occupies, item by item."""

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class KVBytes:
    """Bytes of a cache. All of them, so that ``total`` equals what is allocated.

    ``payload`` codes of keys and values; ``scales`` scales and zero points; ``scores`` running significance;
    ``positions`` of stored tokens; ``window`` recent tokens kept apart at full precision; ``tables`` codebooks,
    page tables, page summaries and map entries of dropped tokens; ``padding`` reserved and not used, and bits left over
    at the ends of rows.
    ``full`` is what the same tokens take uncompressed in FP16, whether stored or dropped.
    """

    payload: int = 0
    scales: int = 0
    scores: int = 0
    positions: int = 0
    window: int = 0
    tables: int = 0
    padding: int = 0
    full: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            count = getattr(self, item.name)
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"{item.name} is {count!r}; bytes are whole numbers from 0")

    def __add__(self, other: Self) -> Self:
        return KVBytes(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    @property
    def total(self) -> int:
        """Everything allocated."""
        return sum(getattr(self, item.name) for item in fields(self)) - self.full

    @property
    def nominal_ratio(self) -> float:
        """Codes alone over FP16: what DiffKV reports as memory (its section 7.1; metadata is not counted)."""
        return self._over_full(self.payload + self.window)

    @property
    def true_ratio(self) -> float:
        """Everything allocated over FP16."""
        return self._over_full(self.total)

    def _over_full(self, count: int) -> float:
        if not self.full:
            raise ValueError("an empty cache has no ratio: it holds no token")
        return count / self.full

    def __str__(self) -> str:
        parts = ", ".join(
            f"{item.name} {getattr(self, item.name):,}"
            for item in fields(self)
            if item.name != "full" and getattr(self, item.name)
        )
        ratios = f"; nominal {self.nominal_ratio:.1%}, true {self.true_ratio:.1%} of FP16" if self.full else ""
        return f"{self.total:,} bytes ({parts}){ratios}"
