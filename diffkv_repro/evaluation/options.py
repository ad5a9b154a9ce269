"""Values from a command line, brought to the types that dataclass fields are annotated with."""

import ast
import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from diffkv_repro.core.precision import Precision

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def coerce(name: str, value: Any, kind: Any) -> Any:
    """``value``, often text, as ``kind``: a scalar, Literal, Precision, Path, dataclass, tuple, list, or a union.

    A tuple or list is written ``[1, 0.02]`` or, of precisions, ``K8V4-K4V2``; a dataclass as JSON. Raises ValueError
    naming the option, the value and what it should be.
    """
    try:
        return _coerce(value, kind)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{name} is {value!r}; it must be {_in_words(kind)}: {error}") from error


def _coerce(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, arguments)
    if origin is Literal:
        return _literal(value, arguments)
    if origin in (tuple, list) or kind in (tuple, list):
        return _sequence(value, origin or kind, arguments)
    if kind is type(None):
        if value is None or str(value).lower() == "none":
            return None
        raise ValueError("not none")
    if kind is Precision:
        return Precision.parse(value)
    if dataclasses.is_dataclass(kind):
        return _dataclass(value, kind)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if isinstance(value, kind if isinstance(kind, type) else object):
        return value
    raise TypeError(f"no text stands for a {_in_words(kind)}")


def _first_that_fits(value: Any, kinds: tuple) -> Any:
    errors = []
    # Text fits everything, so it is tried last; whole numbers before others, so that 4 stays an int.
    order = [type(None), bool, int, float]
    for kind in sorted(kinds, key=lambda kind: order.index(kind) if kind in order else 8 + (kind is str)):
        try:
            if kind is bool and str(value).lower() not in ("true", "false"):
                continue
            return _coerce(value, kind)
        except (TypeError, ValueError, SyntaxError) as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _literal(value: Any, allowed: tuple) -> Any:
    for choice in allowed:
        if value == choice or str(value) == str(choice):
            return choice
    raise ValueError(f"allowed are {', '.join(map(str, allowed))}")


def _sequence(value: Any, kind: type, arguments: tuple) -> Any:
    inner = arguments[0] if arguments else Any
    if isinstance(value, str):
        precisions = inner is Precision and not value.startswith(("[", "("))
        value = value.split("-") if precisions else ast.literal_eval(value)
    if not isinstance(value, tuple | list):
        raise TypeError("several values are needed")
    each = [inner] * len(value) if len(arguments) < 2 or arguments[1] is Ellipsis else list(arguments)
    if len(each) != len(value):
        raise ValueError(f"{len(each)} values are needed")
    return kind(_coerce(item, wanted) for item, wanted in zip(value, each, strict=True))


def _dataclass(value: Any, kind: type) -> Any:
    if isinstance(value, kind):
        return value
    document = json.loads(value) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise TypeError("write its fields as a JSON object")
    hints = get_type_hints(kind)
    unknown = sorted(set(document) - set(hints))
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; it has {', '.join(hints)}")
    return kind(**{name: _coerce(item, hints[name]) for name, item in document.items()})


def _bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError("write True or False")
    return text in _TRUE


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("not a number")
    number = int(value)
    if isinstance(value, float) and number != value:
        raise ValueError("not a whole number")
    return number


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("not a number")
    return float(value)


_SCALARS = {bool: _bool, int: _int, float: _float, str: str, Path: Path}


def _in_words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_in_words(member) for member in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {bool: "True or False", int: "a whole number", float: "a number", str: "text", type(None): "none"}.get(
        kind, getattr(kind, "__name__", str(kind)).lower()
    )
