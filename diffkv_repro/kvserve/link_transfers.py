"""What a server has under way for its clients: a transfer follows one request from its first message to its last."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from diffkv_repro.kvserve.link import LinkError, Outgoing
from diffkv_repro.kvserve.messages import Message
from diffkv_repro.kvserve.shaper import Shaper

_TURN = 32  # chunks of one transfer before the next one's turn


class Say(Protocol):
    """Say a message to a transfer's client; False where the client is gone."""

    def __call__(self, transfer: "Transfer", kind: str, body: Any = b"", **fields: Any) -> bool: ...


class Transfer(ABC):
    """One request of one client, in the hands of the socket's thread.

    ``refused`` and ``complete`` may be set by any thread: the client is told the first, and neither is kept longer.
    """

    def __init__(self, peer: bytes, request: str, now: float) -> None:
        self.peer, self.id = peer, request
        self.asked = self.heard = self.said = now
        self.refused = ""
        self.complete = False

    def hear(self, message: Message, now: float) -> None:
        """Take in a message of this request. Raises LinkError for one that is out of turn."""
        if message.kind != "credit":  # which is also how a client says that it is there
            raise LinkError(f"{message.kind} was said out of turn")

    @abstractmethod
    def advance(self, say: Say, shaper: Shaper) -> float:
        """Say what may be said now; seconds until there may be more, inf where only a message helps."""

    def close(self, reason: str) -> None:  # noqa: B027 (nothing to tidy up, for most)
        """The request was given up."""


class Sending(Transfer):
    """A frame on its way to a client, in chunks, as the link and the client's credits allow."""

    def __init__(self, peer: bytes, request: str, now: float, out: Outgoing) -> None:
        super().__init__(peer, request, now)
        self.out = out
        self.announced = self.ended = False

    @abstractmethod
    def announcement(self) -> tuple[str, Mapping[str, Any]] | None:
        """The message before the first chunk, None while it is not known."""

    @abstractmethod
    def ending(self) -> Mapping[str, float]:
        """Seconds that are told with the last chunk: ``prefill``, ``encode`` and ``queue``."""

    def hear(self, message: Message, now: float) -> None:
        if message.kind == "credit":
            self.out.credit(message["received"], message["used"], now)
        elif message.kind != "done":
            super().hear(message, now)
        elif not self.ended:
            raise LinkError("done was said before the end")
        else:
            self.out.credit(self.out.sent, self.out.sent, now)
            self.complete = True

    def advance(self, say: Say, shaper: Shaper) -> float:
        if not self.announced and (first := self.announcement()) is not None:
            self.announced = say(self, first[0], **first[1])
        wait = self._chunks(say, shaper)
        if self.announced and not self.ended and not self.refused and self.out.finished:
            self.ended = say(self, "end", bytes=self.out.sent, **self.ending())
        return wait

    def _chunks(self, say: Say, shaper: Shaper) -> float:
        for _ in range(_TURN):
            now = time.monotonic()
            chunk, then = self.out.take(shaper, now)
            if chunk is None:
                return then - now
            if not say(self, "piece", chunk):
                return math.inf
        return 0.0

    def close(self, reason: str) -> None:
        self.out.close(reason)
