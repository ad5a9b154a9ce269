"""``LinkStore``: a :class:`FrameStore` at the other end of the link, kept there by ``diffkv-repro serve frames``."""

import errno
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.paths import cache_dir
from diffkv_repro.kvserve.connection import Connection, Exchange
from diffkv_repro.kvserve.frame_store import STORES, FrameMissing, Receipt
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.keys import CLIENT, load_keys
from diffkv_repro.kvserve.link import Incoming, LinkError, LinkSettings, Outgoing, Refused
from diffkv_repro.kvserve.messages import Message
from diffkv_repro.kvserve.shaper import Shaper

PAUSE = 10.0  # seconds for which a store that was away is not asked again
_RECEIPTS = 128  # names in one question, so that the answer fits its message
_Found = TypeVar("_Found")


class StoreAway(OSError):
    """A store that cannot be reached, does not answer, or refuses."""


class LinkStore:
    """Frames of the :class:`FrameServer` that ``connection`` leads to.

    A store that does not answer is said to be away once, by a StoreAway with the reason; for PAUSE seconds after that
    nobody waits for it again: nothing is found, and what is put or got fails at once.
    """

    def __init__(self, connection: Connection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.connection, self._clock = connection, clock
        self._away_until, self._why = -math.inf, ""

    def close(self) -> None:
        """Let the connection go."""
        self.connection.close()

    def find(self, names: Sequence[str]) -> int | None:
        if not names or self._clock() < self._away_until:
            return None
        place = self._call("find", "\n".join(names)).get("place")
        if place is not None and not (isinstance(place, int) and 0 <= place < len(names)):
            raise StoreAway(errno.EPROTO, f"{self.connection.endpoint} found place {place!r} of {len(names)}")
        return place

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        return self._through(lambda: _Put(self.connection, name).run(pieces))

    def get(self, name: str, most: int) -> bytes:
        try:
            return self._through(lambda: _Get(self.connection, name, most).run())
        except StoreAway as error:
            if isinstance(error.__cause__, Refused):
                raise FrameMissing(errno.ENOENT, error.strerror) from error
            raise

    def discard(self, name: str) -> None:
        self._call("discard", name=name)

    def acknowledge(self, name: str, receipt: Receipt) -> None:
        self._call("acknowledge", name=name, fetch=receipt.fetch, decode=receipt.decode, sent_bytes=receipt.sent_bytes)

    def receipts(self, names: Iterable[str]) -> dict[str, Receipt]:
        listed, found = list(names), {}
        if self._clock() < self._away_until:
            return found
        for start in range(0, len(listed), _RECEIPTS):
            given = self._call("receipts", "\n".join(listed[start : start + _RECEIPTS]))
            try:
                found |= {name: Receipt(*values) for name, values in given.items()}
            except (TypeError, ValueError) as error:
                raise StoreAway(errno.EPROTO, f"what {self.connection.endpoint} gave is no receipt: {error}") from error
        return found

    def _call(self, kind: str, body: str = "", **fields: Any) -> dict[str, Any]:
        return self._through(lambda: _Call(self.connection, kind, body, **fields).run())

    def _through(self, ask: Callable[[], _Found]) -> _Found:
        if self._clock() < self._away_until:
            raise StoreAway(errno.EHOSTUNREACH, f"not asked again yet: {self._why}")
        try:
            self.connection.connect()
            return ask()
        except Refused as error:
            raise StoreAway(errno.EPERM, f"the store at {self.connection.endpoint} {error}") from error
        except LinkError as error:
            self._away_until, self._why = self._clock() + PAUSE, f"the store is away: {error}"
            raise StoreAway(errno.EHOSTUNREACH, self._why) from error


class _Call(Exchange):
    """A question with an answer of one message."""

    milliseconds = 5

    def __init__(self, connection: Connection, kind: str, body: str = "", **fields: Any) -> None:
        super().__init__(connection)
        self.answer: dict[str, Any] | None = None
        self._asked = kind, body.encode("ascii"), fields

    def run(self) -> dict[str, Any]:
        kind, body, fields = self._asked
        self.say(kind, body, **fields)
        try:
            self.listen()
        except (LinkError, FrameError) as error:
            self.give_up(first_line(error))
            raise
        return self.answer

    def take(self, message: Message) -> None:
        if message.kind != "answer" or self.answer is not None:
            raise self.out_of_turn(message)
        self.answer = dict(message["values"])

    def finished(self) -> bool:
        return self.answer is not None


class _Get(_Call):
    """A frame that comes."""

    milliseconds = 20

    def __init__(self, connection: Connection, name: str, most: int) -> None:
        window = connection.settings.window_bytes
        super().__init__(connection, "get", name=name, most=most, window=window)
        self._incoming = Incoming(window, most, overlap=False)
        self._end: Message | None = None

    def run(self) -> bytes:
        super().run()
        data = bytes(self._incoming.read(self._incoming.received))
        self.say("done", decode=0.0)
        return data

    def take(self, message: Message) -> None:
        if self.answer is None:
            super().take(message)
            if "damaged" in self.answer:
                raise FrameError(str(self.answer["damaged"]))
        elif message.kind == "piece" and self._end is None:
            self._incoming.add(message.body)
        elif message.kind == "end" and self._end is None:
            self._incoming.end(message["bytes"])
            self._end = message
        else:
            raise self.out_of_turn(message)

    def finished(self) -> bool:
        return self._end is not None

    def acknowledged(self) -> tuple[int, int]:
        return self._incoming.received, self._incoming.used


class _Put(_Call):
    """A frame that goes. The caller's thread makes its pieces (where a GPU's stream and modes are its own); another
    has the connection meanwhile."""

    milliseconds = 1

    def __init__(self, connection: Connection, name: str) -> None:
        super().__init__(connection, "put", name=name)
        given = connection.settings
        self._out, self._shaper = Outgoing(given.window_bytes, given.chunk_bytes), Shaper()
        self._ended = False
        self._error: Exception | None = None

    def run(self, pieces: Iterable[bytes]) -> int:
        talking = threading.Thread(target=self._talk, name="kv-put", daemon=True)
        talking.start()
        try:
            for piece in pieces:
                self._out.put(piece)
            self._out.complete()
        except BaseException as error:
            self._out.close(first_line(error) or type(error).__name__)
            talking.join()
            if self._error is not None and isinstance(error, LinkError):
                raise self._error from None
            raise
        talking.join()
        if self._error is not None:
            raise self._error
        if self.answer.get("bytes") != self._out.sent:
            raise LinkError(f"{self._out.sent} bytes were sent, and {self.answer.get('bytes')!r} kept")
        return self._out.sent

    def _talk(self) -> None:
        try:
            super().run()
        except Exception as error:
            self._error = error
            self._out.close(first_line(error))

    def take(self, message: Message) -> None:
        if message.kind == "credit":
            self._out.credit(message["received"], message["used"], time.monotonic())
        elif self._ended:
            super().take(message)
        else:
            raise self.out_of_turn(message)

    def advance(self) -> None:
        if self._out.closed:
            raise LinkError(self._out.closed)
        while not self._ended:
            chunk, _ = self._out.take(self._shaper, time.monotonic())
            if chunk is not None:
                self.say("piece", chunk)
                continue
            if self._out.finished:
                self.say("end", bytes=self._out.sent, prefill=0.0, encode=0.0, queue=0.0)
                self._ended = True
            return


def open_link_store(
    address: str, *, most_bytes: float = math.inf, keys: str | None = None, insecure: bool = False
) -> LinkStore:
    """The store of a server at ``address``, ``tcp://HOST:PORT``, with the keys of a folder: by default those of
    ``diffkv-repro serve keys``. Raises ValueError for keys that cannot be used; nothing is asked of the server yet."""
    if most_bytes < math.inf:
        raise ValueError("a store behind a link bounds itself: give --limit-gb to `diffkv-repro serve frames`")
    if insecure and keys is not None:
        raise ValueError("keys and insecure are both given; one or the other")
    given = None if insecure else load_keys(Path(keys).expanduser() if keys else cache_dir() / "keys", CLIENT)
    try:
        return LinkStore(Connection(keys=given, endpoint=address, settings=LinkSettings(connect=2.0)))
    except LinkError as error:
        raise ValueError(f"store is {address!r}: {error}") from error


STORES["tcp"] = open_link_store
