"""The two ends of one transfer: chunks in order, credits for what was used up, bounded memory on both sides.

A receiver grants a window. Of a frame never more bytes are under way or unread than that, and a sender holds no more
than a window of encoded bytes back (with stages in turn, the frame). The bytes acknowledged and the time during which
the link had something to carry give the goodput.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.registry import require_whole
from diffkv_repro.kvserve.shaper import Shaper

LOOPBACK = "tcp://127.0.0.1:5750"


class LinkError(RuntimeError):
    """A transfer that cannot go on: the other side is gone, refuses, or does not keep to the protocol."""


def require_address(endpoint: str) -> None:
    """Raise LinkError for a port that is none: ZeroMQ would take what is left of it after 65536 for another."""
    port = endpoint.rsplit(":", 1)[1] if endpoint.startswith("tcp://") else "*"
    if port != "*" and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise LinkError(f"{endpoint!r} is no address: port {port!r} is none of 1 to 65535, nor *")


class Refused(LinkError):
    """The other side is there and says no."""


@dataclass(frozen=True)
class LinkSettings:
    """``chunk_bytes`` go in one message; ``window_bytes`` is what a receiver grants; ``patience`` seconds of silence
    mean that the other side is gone; a request is given up after ``deadline`` seconds, a connection after ``connect``.
    """

    chunk_bytes: int = 1 << 17
    window_bytes: int = 1 << 22
    patience: float = 5.0
    deadline: float = 120.0
    connect: float = 5.0

    def __post_init__(self) -> None:
        require_whole("chunk_bytes", self.chunk_bytes, 1, 1 << 20)
        require_whole("window_bytes", self.window_bytes, self.chunk_bytes, 1 << 30)
        for name in ("patience", "deadline", "connect"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)} s; it must be finite and above 0")

    @property
    def heartbeat(self) -> float:
        """Seconds after which an idle side says that it is there; the other side may be less patient than this one."""
        return min(0.5, self.patience / 5)


class Outgoing:
    """The sender's end. One thread puts pieces of a frame, another takes chunks of them when the link is ready."""

    def __init__(self, window: int, chunk_bytes: int) -> None:
        self._window, self._chunk = window, chunk_bytes
        self._chunks: deque[tuple[memoryview, float]] = deque()
        self._changed = threading.Condition()
        self._queued = self.sent = self.received = self.used = 0
        self._held = False
        self._credited = -math.inf
        self._busy_since: float | None = None
        self._busy = 0.0
        self._complete = False
        self._closed = ""

    def put(self, piece: bytes | memoryview, *, wait: bool = True) -> None:
        """Hand over the next piece; waits while a window of bytes is held back. Raises LinkError once closed."""
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), self._chunk):
            chunk = view[start : start + self._chunk]
            with self._changed:
                while wait and self._queued and self._queued + len(chunk) > self._window and not self._closed:
                    self._changed.wait()
                if self._closed:
                    raise LinkError(self._closed)
                self._chunks.append((chunk, time.monotonic()))
                self._queued += len(chunk)

    def complete(self) -> None:
        """There are no more pieces."""
        with self._changed:
            self._complete = True

    def close(self, reason: str) -> None:
        """Give the transfer up: whoever puts gets a LinkError."""
        with self._changed:
            self._closed = self._closed or reason
            self._chunks.clear()
            self._queued = 0
            self._changed.notify_all()

    @property
    def closed(self) -> str:
        """Why it was given up, or nothing."""
        return self._closed

    @property
    def finished(self) -> bool:
        """Whether all bytes have left."""
        with self._changed:
            return self._complete and not self._chunks

    def take(self, shaper: Shaper, now: float) -> tuple[memoryview | None, float]:
        """A chunk that may leave ``now``, or None and the time of the next one (inf where only a credit helps)."""
        with self._changed:
            if not self._chunks:
                return None, math.inf
            chunk, available = self._chunks[0]
            under_way = self.sent - self.used
            if under_way and under_way + len(chunk) > self._window:
                self._held = True
                return None, math.inf
            if self._busy_since is None:
                self._busy_since = max(available, self._credited)
            departure = shaper.departure(len(chunk), max(available, self._credited))
            if departure > now:
                return None, departure
            self._chunks.popleft()
            self._queued -= len(chunk)
            shaper.sent(departure)
            self.sent += len(chunk)
            self._changed.notify_all()
            return chunk, now

    def credit(self, received: int, used: int, now: float) -> None:
        """Note what the receiver has got and used up. Raises LinkError for numbers that cannot be."""
        with self._changed:
            if not self.used <= used <= received <= self.sent or received < self.received:
                raise LinkError(f"{received} bytes received and {used} used are acknowledged; {self.sent} were sent")
            if self._held and used > self.used:
                self._held, self._credited = False, now
            self.received, self.used = received, used
            if received == self.sent and (self._held or not self._chunks) and self._busy_since is not None:
                self._busy += max(0.0, now - self._busy_since)
                self._busy_since = None

    @property
    def busy(self) -> float:
        """Seconds during which the link had something to carry, up to the last acknowledgement."""
        return self._busy


class Incoming:
    """The receiver's end: chunks are added by one thread and read, exactly as many bytes as asked for, by another.

    With ``overlap`` what is read counts as used; without, nothing is read before the end, and what has arrived is used.
    ``most`` bounds the frame.
    """

    def __init__(self, window: int, most: int, *, overlap: bool) -> None:
        self._window, self._most, self._overlap = window, most, overlap
        self._chunks: deque[tuple[memoryview, float]] = deque()
        self._changed = threading.Condition()
        self.received = self.used = 0
        self.waited = 0.0
        self._ended = False
        self._failed = ""

    def add(self, chunk: Any) -> None:
        """Take a chunk in. Raises LinkError where the sender goes over its credit or over ``most``."""
        view = memoryview(chunk).cast("B")
        with self._changed:
            self.received += len(view)
            if self._overlap and self.received - self.used > self._window + len(view):
                raise LinkError(f"{self.received - self.used} bytes unread; the sender was granted {self._window}")
            if self.received > self._most:
                raise LinkError(f"{self.received} bytes of a frame; at most {self._most} are allowed")
            if not self._overlap:
                self.used = self.received
            self._chunks.append((view, time.monotonic()))
            self._changed.notify_all()

    def end(self, total: int) -> None:
        """All bytes were sent. Raises LinkError where not as many came."""
        with self._changed:
            if total != self.received:
                raise LinkError(f"{self.received} bytes of a frame came; {total} were sent")
            self._ended = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """No more will come: whoever reads gets a FrameError."""
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()

    def read(self, count: int) -> bytearray:
        """The next ``count`` bytes. Raises FrameError where the frame ends before."""
        found, at = bytearray(count), 0
        while at < count:
            with self._changed:
                started = time.perf_counter()
                while not self._failed and not self._ended and not (self._chunks and self._overlap):
                    self._changed.wait()
                self.waited += time.perf_counter() - started
                if self._failed:
                    raise FrameError(self._failed)
                if not self._chunks:
                    raise FrameError(f"truncated: {count} bytes are needed, and {at} are left")
                chunk, arrived = self._chunks.popleft()
                part = chunk[: count - at]
                if len(part) < len(chunk):
                    self._chunks.appendleft((chunk[len(part) :], arrived))
                if self._overlap:
                    self.used += len(part)
            found[at : at + len(part)] = part
            at += len(part)
        return found

    def chunks(self) -> Iterator[tuple[memoryview, float]]:
        """What arrives, and when it did; a chunk counts as used when the next one is asked for. Raises FrameError where
        the rest does not come. Needs ``overlap``."""
        while True:
            with self._changed:
                while not (self._failed or self._ended or self._chunks):
                    self._changed.wait()
                if self._failed:
                    raise FrameError(self._failed)
                if not self._chunks:
                    return
                chunk = self._chunks.popleft()
            yield chunk
            with self._changed:
                self.used += len(chunk[0])

    @property
    def failed(self) -> str:
        """Why no more will come, or nothing."""
        return self._failed

    def at_end(self) -> bool:
        """Whether everything was read, once the sender has ended."""
        with self._changed:
            while not self._failed and not self._ended and not self._chunks:
                self._changed.wait()
            return not self._chunks
