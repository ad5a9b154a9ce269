"""What the two sides of a transfer say to each other: a JSON header, and bytes beside it that are never interpreted.

client -> server   ask    tokens of the prompt beside it       credit  bytes received and used up so far
                   done   seconds at the far side              cancel
server -> client   start  what was decided                     piece   bytes of a frame beside it
                   end    bytes of the frame, seconds          refuse  the reason
                   alive  still at work                        receipt answers done: what the link gave

A server of frames is asked by their names, and answers each question with one ``answer``:

client -> server   find, receipts   names beside it, a line each    discard, acknowledge   one name
                   get    the frame follows the answer              put    the frame follows, credits come back
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
MOST_HEADER = 1 << 16
MOST_TOKENS = 1 << 20

_TEXT, _COUNT, _SECONDS, _FLAG, _MAP = str, int, float, bool, dict
_FIELDS: dict[str, dict[str, type]] = {
    "ask": {
        "tokens": _COUNT, "model": _TEXT, "workload": _TEXT, "slo": _SECONDS, "min_quality": _SECONDS,
        "recompute": _SECONDS, "window": _COUNT, "overlap": _FLAG, "options": _MAP,
    },
    "credit": {"received": _COUNT, "used": _COUNT},
    "done": {"decode": _SECONDS},
    "cancel": {"reason": _TEXT},
    "start": {"profile": _TEXT, "why": _TEXT, "predicted": _SECONDS, "tokens": _COUNT, "whole": _COUNT},
    "piece": {},
    "end": {"bytes": _COUNT, "prefill": _SECONDS, "encode": _SECONDS, "queue": _SECONDS},
    "refuse": {"reason": _TEXT},
    "receipt": {"send": _SECONDS, "observed": _SECONDS},
    "alive": {},
    "find": {},
    "receipts": {},
    "get": {"name": _TEXT, "most": _COUNT, "window": _COUNT},
    "put": {"name": _TEXT},
    "discard": {"name": _TEXT},
    "acknowledge": {"name": _TEXT, "fetch": _SECONDS, "decode": _SECONDS, "sent_bytes": _COUNT},
    "answer": {"values": _MAP},
}  # fmt: skip


OPENING = frozenset({"ask", "find", "receipts", "get", "put", "discard", "acknowledge"})
"""Kinds that begin a request."""


class MessageError(ValueError):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True)
class Message:
    """``kind`` of ``request`` with its fields, and the ``body`` beside them."""

    kind: str
    request: str
    fields: Mapping[str, Any]
    body: bytes | memoryview = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def pack(kind: str, request: str, body: Any = b"", **fields: Any) -> list[Any]:
    """The parts of a message. Raises MessageError for fields other than those of its kind."""
    _check(kind, request, fields)
    plain = {name: _to_json(value) for name, value in fields.items()}
    head = json.dumps({"v": VERSION, "kind": kind, "request": request, **plain}, separators=(",", ":")).encode()
    if len(head) > MOST_HEADER:
        raise MessageError(f"a header of {kind} takes {len(head)} bytes; at most {MOST_HEADER} are allowed")
    return [head, body]


def unpack(parts: list[Any]) -> Message:
    """The message of these parts. Raises MessageError for anything else than one of this protocol and version."""
    if len(parts) != 2:
        raise MessageError(f"{len(parts)} parts; a message has 2")
    head, body = (memoryview(part) for part in parts)
    if len(head) > MOST_HEADER:
        raise MessageError(f"a header of {len(head)} bytes; at most {MOST_HEADER} are allowed")
    try:
        fields = json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a header is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.pop("v", None) != VERSION:
        raise MessageError(f"a header of another protocol or version; this is version {VERSION}")
    kind, request = fields.pop("kind", None), fields.pop("request", None)
    known = _FIELDS.get(kind, {}) if isinstance(kind, str) else {}
    given = {name: _from_json(value) if known.get(name) is _SECONDS else value for name, value in fields.items()}
    _check(kind, request, given)
    return Message(kind, request, given, body)


def _check(kind: Any, request: Any, fields: Mapping[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise MessageError(f"unknown kind {kind!r}; allowed are {', '.join(_FIELDS)}")
    if not isinstance(request, str) or not 1 <= len(request) <= 64:
        raise MessageError(f"request is {request!r}; an id of 1 to 64 characters is needed")
    wanted = _FIELDS[kind]
    if set(fields) != set(wanted):
        raise MessageError(f"{kind} has fields {', '.join(fields) or 'none'}; it needs {', '.join(wanted) or 'none'}")
    for name, value in fields.items():
        if not _fits(value, wanted[name]):
            raise MessageError(f"{name} of {kind} is {value!r}; a {wanted[name].__name__} is needed, not negative")


def _fits(value: Any, kind: type) -> bool:
    if kind is _SECONDS:
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if kind is _COUNT:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    return isinstance(value, kind)


def _to_json(value: Any) -> Any:
    """JSON has no infinity, which an SLO may be."""
    return "inf" if isinstance(value, float) and value == math.inf else value


def _from_json(value: Any) -> Any:
    return math.inf if value == "inf" else value
