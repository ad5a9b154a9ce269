"""``Precision``: bits and scale groups of keys and values, written as in the papers: ``K8V4``, ``K4V2:2/4``."""

import re
from dataclasses import dataclass
from typing import Self

BITS = (1, 2, 4, 8, 16)
_NAME = re.compile(r"K(\d+)V(\d+)(?::(\d+)/(\d+))?")


@dataclass(frozen=True)
class Precision:
    """``key_bits`` and ``value_bits`` of {1, 2, 4, 8, 16}, where 16 is stored as it is, without scales.

    ``key_groups`` and ``value_groups`` are scale groups per vector: each group of channels has a scale and a
    zero point of its own (DiffKV section 6; one group unless said otherwise).
    """

    key_bits: int
    value_bits: int
    key_groups: int = 1
    value_groups: int = 1

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if not isinstance(bits, int) or bits not in BITS:
                raise ValueError(f"{name} is {bits!r}; allowed are {', '.join(map(str, BITS))}")
        for name, groups in (("key_groups", self.key_groups), ("value_groups", self.value_groups)):
            if not isinstance(groups, int) or groups < 1:
                raise ValueError(f"{name} is {groups!r}; it must be a whole number of at least 1")

    @classmethod
    def parse(cls, name: "str | Precision") -> Self:
        """``K8V4``, or ``K4V2:2/4`` with scale groups of keys and values; ``FP16`` is K16V16."""
        if isinstance(name, cls):
            return name
        text = "K16V16" if str(name).upper() == "FP16" else str(name)
        found = _NAME.fullmatch(text.upper())
        if not found:
            raise ValueError(
                f"unknown precision {name!r}; write K<bits>V<bits>, as K8V4, or with scale groups per vector as "
                f"K4V2:2/4; bits are of {', '.join(map(str, BITS))}"
            )
        key_bits, value_bits, key_groups, value_groups = found.groups(default="1")
        return cls(int(key_bits), int(value_bits), int(key_groups), int(value_groups))

    def __str__(self) -> str:
        groups = f":{self.key_groups}/{self.value_groups}" if (self.key_groups, self.value_groups) != (1, 1) else ""
        return f"K{self.key_bits}V{self.value_bits}{groups}"

    @property
    def nominal_ratio(self) -> float:
        """Bits of the codes alone over those of FP16: what DiffKV reports as memory."""
        return (self.key_bits + self.value_bits) / 32

    def metadata_bytes(self) -> int:
        """Bytes of scales and zero points of one token in one KV head, FP16 each."""
        keys = self.key_groups if self.key_bits < 16 else 0
        values = self.value_groups if self.value_bits < 16 else 0
        return 4 * (keys + values)
