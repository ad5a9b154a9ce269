"""Parts of a profile: small frozen dataclasses that are found by name, or by the format id in a frame."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import yaml


class Part:
    """One stage of a profile with its parameters, a frozen dataclass.

    ``name`` is what profiles call it, ``format_id`` (1 to 255) what frames do: neither ever changes its meaning.
    """

    name: ClassVar[str]
    format_id: ClassVar[int]
    # How :meth:`__str__` shortens parameters: a pattern, and the parameters that its groups are, or what it stands for.
    shorthand: ClassVar[tuple[tuple[str, tuple[str, ...] | Mapping[str, Any]], ...]] = ()

    def params(self) -> dict[str, Any]:
        """Parameters as plain data, all of them: a later version may have other defaults."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Self:
        """The part that :meth:`params` describes. Raises ValueError for unknown parameters and bad values."""
        if not isinstance(params, dict):
            raise ValueError(f"parameters of {cls.name} are {params!r}; a mapping is needed")
        allowed = [item.name for item in fields(cls)]
        unknown = sorted(set(map(str, params)) - set(allowed))
        if unknown:
            raise ValueError(f"{cls.name} has no parameter {unknown[0]!r}; allowed are {', '.join(allowed) or 'none'}")
        return cls(**{key: _frozen(value) for key, value in params.items()})

    @classmethod
    def parse(cls, text: str) -> Self:
        """The part that ``text`` describes, without its name: ``level=3``, or as :meth:`__str__` writes it.

        Raises ValueError for words that say nothing of this part.
        """
        return cls.from_params(cls.words(text))

    @classmethod
    def words(cls, text: str) -> dict[str, Any]:
        """The parameters in :meth:`parse`'s text."""
        params, rest = {}, text.strip()
        while rest:
            tried = ((re.match(rf"{pattern}(?:\s+|$)", rest), meaning) for pattern, meaning in cls.shorthand)
            found, meaning = next((pair for pair in tried if pair[0]), (re.match(r"(\w+)=(\S+)(?:\s+|$)", rest), None))
            if found is None:
                raise ValueError(f"{rest.split()[0]!r} is no parameter of {cls.name}; write name=value")
            if meaning is None:
                params[found[1]] = read_value(found[2])
            elif isinstance(meaning, Mapping):
                params |= meaning
            else:
                params |= zip(meaning, map(read_value, found.groups()), strict=True)
            rest = rest[found.end() :]
        return params

    def __str__(self) -> str:
        changed = (item for item in fields(self) if getattr(self, item.name) != item.default)
        return " ".join([self.name, *(f"{item.name}={_short(getattr(self, item.name))}" for item in changed)])


class Registry:
    """The parts of one kind, by name and by format id."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._by_name: dict[str, type[Part]] = {}
        self._by_id: dict[int, type[Part]] = {}

    def add(self, part: type) -> type:
        """Decorator that enters a part. Raises ValueError where its name or format id is taken."""
        if part.name in self._by_name or part.format_id in self._by_id:
            raise ValueError(f"{self.kind} {part.name!r} (format id {part.format_id}) is already registered")
        if not 1 <= part.format_id <= 255:
            raise ValueError(f"format id of {part.name} is {part.format_id}; allowed are 1 to 255")
        self._by_name[part.name], self._by_id[part.format_id] = part, part
        return part

    def parse(self, text: str) -> Part:
        """The part that a name and words after it describe. Raises ValueError with the known names."""
        name, _, rest = text.strip().partition(" ")
        return self._named(name).parse(rest)

    @property
    def names(self) -> list[str]:
        """In the order of their format ids."""
        return [self._by_id[index].name for index in sorted(self._by_id)]

    def make(self, name: str, params: dict[str, Any] | None = None) -> Part:
        """The part called ``name``. Raises ValueError with the known names."""
        return self._named(name).from_params(params or {})

    def of_format(self, format_id: int, params: dict[str, Any]) -> Part:
        """The part with that format id. Raises ValueError for an id that nothing here can read."""
        if format_id not in self._by_id:
            raise ValueError(f"unknown {self.kind} format id {format_id}; known are {sorted(self._by_id)}")
        return self._by_id[format_id].from_params(params)

    def _named(self, name: str) -> type[Part]:
        if not isinstance(name, str) or name not in self._by_name:
            raise ValueError(f"unknown {self.kind} {name!r}; allowed are {', '.join(self.names)}")
        return self._by_name[name]


def read_value(text: str) -> Any:
    """A parameter's value as :meth:`Part.__str__` writes it: tuples with slashes, - for none, else as in YAML."""
    if text == "-":
        return None
    return [read_value(part) for part in text.split("/")] if "/" in text else yaml.safe_load(text)


def short(number: float) -> str:
    """A number in few digits where they say it all."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def require_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ValueError unless ``value`` is a whole number of ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"whole numbers from {low}" + ("" if high is None else f" to {high}")
        raise ValueError(f"{name} is {value!r}; allowed are {allowed}")


def require_share(name: str, value: object, low: float = 0.0, high: float = 1.0) -> None:
    """Raise ValueError unless ``value`` is a number of ``low`` to ``high``."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed are numbers from {low:g} to {high:g}")


def require_flag(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; allowed are True and False")


def require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; allowed are {', '.join(allowed)}")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    return "/".join(map(_short, value)) if isinstance(value, tuple) else str(value)
