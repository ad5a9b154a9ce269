"""``PageLayout``: where the tokens of one precision lie in a unified page, derived and never a literal.

Every page of the pool has the same size; its tier says how it is divided (DiffKV section 5.1). Six segments in order:
key codes, key scales, value codes, value scales, scores, positions. Two things are chosen for the tensor cores of the
attention kernel, and change no size:

* key codes are token by token, channels in order, each row packed from its lowest bit up;
* value codes are in *units* of 16 bits, each of consecutive channels of one token, and the units of two neighbouring
  tokens alternate. A 32-bit word thus holds the same channels of an even token (low half) and of the next one (high
  half), which is how a matrix instruction takes two steps of the sum over tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from diffkv_repro.core.precision import Precision

_SEGMENT = 32  # bytes: each segment starts on a multiple of it ...
_VALUES = 128  # ... value codes on one of this, and a page is a multiple of this too (official code)
_UNIT_BITS = 16


@dataclass(frozen=True)
class PageLayout:
    """How ``page_bytes`` bytes hold tokens of ``precision`` with ``head_dim`` channels; as many tokens as fit.

    Offsets are bytes from the start of the page. Scales are FP16 pairs (scale, zero point), ``groups`` a token;
    a side of 16 bits has none. A score is a float32 and a position an int32. Raises ``ValueError`` for a page that
    holds no token, and for channels that do not fill 16-bit units.
    """

    precision: Precision
    head_dim: int
    page_bytes: int

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(f"head_dim is {self.head_dim}; it must be at least 1")
        if self.page_bytes < 1 or self.page_bytes % _VALUES:
            raise ValueError(f"page_bytes is {self.page_bytes}; a page is a positive multiple of {_VALUES} bytes")
        for name, bits, groups in (
            ("key", self.precision.key_bits, self.precision.key_groups),
            ("value", self.precision.value_bits, self.precision.value_groups),
        ):
            if self.head_dim * bits % _UNIT_BITS:
                raise ValueError(
                    f"{self.head_dim} channels of {bits} bits ({name}s of {self.precision}) do not fill units of "
                    f"{_UNIT_BITS} bits; head_dim must be a multiple of {_UNIT_BITS // bits}"
                )
            if self.head_dim % groups:
                raise ValueError(f"{groups} {name} groups do not divide head_dim {self.head_dim} ({self.precision})")
        if self.tokens < 1:
            raise ValueError(
                f"a page of {self.page_bytes} bytes holds no token of {self.precision} at head_dim {self.head_dim}; "
                f"it takes at least {self._end(1)} bytes"
            )

    @classmethod
    def holding(cls, precision: Precision, head_dim: int, tokens: int) -> "PageLayout":
        """The smallest page that holds ``tokens`` tokens; with room for more, where rounding up leaves it."""
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}; it must be at least 1")
        size = _VALUES
        while True:
            try:
                if (page := cls(precision, head_dim, size)).tokens >= tokens:
                    return page
            except ValueError:
                if size > 64 * head_dim:  # not too small, but impossible
                    raise
            size += _VALUES

    @cached_property
    def tokens(self) -> int:
        """Tokens that a page holds."""
        count = self.page_bytes // self.token_bytes
        while count > 0 and self._end(count) > self.page_bytes:
            count -= 1
        return count

    @property
    def key_row_bytes(self) -> int:
        """Bytes of the key codes of one token."""
        return self.head_dim * self.precision.key_bits // 8

    @property
    def value_row_bytes(self) -> int:
        """Bytes of the value codes of one token."""
        return self.head_dim * self.precision.value_bits // 8

    @property
    def key_groups(self) -> int:
        """Scale groups of a key; 0 where keys are stored as they are."""
        return self.precision.key_groups if self.precision.key_bits < 16 else 0

    @property
    def value_groups(self) -> int:
        """Scale groups of a value; 0 where values are stored as they are."""
        return self.precision.value_groups if self.precision.value_bits < 16 else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token without any padding: codes, scales, score and position."""
        return self.key_row_bytes + self.value_row_bytes + self.precision.metadata_bytes() + 8

    @property
    def slack_bytes(self) -> int:
        """Bytes of a full page that hold nothing."""
        return self.page_bytes - self.tokens * self.token_bytes

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Where key codes, key scales, value codes, value scales, scores and positions start."""
        return self._offsets(self.tokens)

    def _offsets(self, count: int) -> tuple[int, int, int, int, int, int]:
        key_scales = _up(count * self.key_row_bytes, _SEGMENT)
        values = _up(key_scales + 4 * count * self.key_groups, _VALUES)
        value_scales = _up(values + (count + count % 2) * self.value_row_bytes, _SEGMENT)
        scores = _up(value_scales + 4 * count * self.value_groups, _SEGMENT)
        positions = _up(scores + 4 * count, _SEGMENT)
        return 0, key_scales, values, value_scales, scores, positions

    def _end(self, count: int) -> int:
        return self._offsets(count)[-1] + 4 * count


def search_page_bytes(
    precisions: Iterable[Precision | str], head_dim: int, candidates: Sequence[int] | None = None
) -> int:
    """The page size whose worst slack, as a share of the page, is least over ``precisions``; the smallest on ties.

    ``candidates`` are multiples of 128 from 896 to 7,936 by default, as in the official code, which for its four
    precisions at head_dim 128 finds 6,784.
    """
    parsed = [Precision.parse(precision) for precision in precisions]
    if not parsed:
        raise ValueError("no precision to lay out")
    best: tuple[float, int] | None = None
    for size in candidates or range(7 * _VALUES, 8000, _VALUES):
        try:
            slack = max(PageLayout(precision, head_dim, size).slack_bytes / size for precision in parsed)
        except ValueError:
            continue  # too small for one of them
        if best is None or slack < best[0]:
            best = slack, size
    if best is None:
        raise ValueError(f"no candidate page size holds a token of each of {', '.join(map(str, parsed))}")
    return best[1]


def table_bytes(*, layers: int, kv_heads: int, requests: int, tokens: int, tokens_per_page: int) -> int:
    """Bytes of page tables that hold ``tokens`` tokens of every head: an int32 a page (section 5.2)."""
    return 4 * layers * kv_heads * requests * -(-tokens // tokens_per_page)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
