"""``FrameServer``: a folder of frames behind the link, for instances that share no disk. Frames are never looked into.

A client asks by name (``find``, ``get``, ``put`` and the rest of :class:`FrameStore`); the link's credits, keys and
shaping hold for both directions. The disk is left to threads of their own.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.frame_store import FolderStore, FrameMissing, Receipt
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.keys import Keys
from diffkv_repro.kvserve.link import LOOPBACK, Incoming, LinkError, LinkSettings, Outgoing
from diffkv_repro.kvserve.link_server import LinkServer
from diffkv_repro.kvserve.link_transfers import Say, Sending, Transfer
from diffkv_repro.kvserve.messages import Message
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.terms import Refusal

log = logging.getLogger(__name__)

_THREADS = 16
_LOOK = 0.05  # seconds between looks whether a paced upload was given up


class FrameServer(LinkServer):
    """A :class:`LinkServer` of ``store``; ``say_line`` is told what was stored and sent, a line each.

    ``most_bytes`` bounds a frame. Uploads are shaped to the same rate as downloads, as on a link of two directions.
    """

    opening = frozenset({"find", "get", "put", "discard", "acknowledge", "receipts"})

    def __init__(
        self, store: FolderStore, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        shaper: Shaper | None = None, most_bytes: int = 1 << 36, say_line: Callable[[str], Any] = log.info,
    ) -> None:  # fmt: skip
        super().__init__(keys=keys, endpoint=endpoint, settings=settings, shaper=shaper)
        self.store, self.most_bytes, self.say_line = store, most_bytes, say_line
        self._upwards = Shaper(self.shaper.rate)
        self._listing = Lock()  # a store is for one thread, but only looking keeps a state
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-frames")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, peer: bytes, message: Message, now: float) -> Transfer:
        own, name, kind = self.settings, message.fields.get("name", ""), message.kind
        if kind == "get":
            window = min(message["window"], own.window_bytes)
            if not window:
                raise Refusal("a window of 0 bytes; nothing could be sent")
            out = Outgoing(window, min(own.chunk_bytes, window))
            transfer = _Download(peer, message.request, now, out, partial(self._said, name))
            self._submit(transfer, self._read, transfer, name, message["most"])
        elif kind == "put":
            incoming = Incoming(own.window_bytes, self.most_bytes, overlap=True)
            transfer = _Upload(peer, message.request, now, incoming)
            self._submit(transfer, self._write, transfer, name)
        else:
            transfer = _Call(peer, message.request, now)
            self._submit(transfer, self._answer, transfer, message)
        return transfer

    def _submit(self, transfer: Transfer, work: Callable[..., None], *given: Any) -> None:
        def run() -> None:
            try:
                work(*given)
            except (FrameMissing, FrameError, LinkError, ValueError, TypeError, OSError) as error:
                transfer.refused = getattr(error, "strerror", None) or first_line(error) or "refused"
            except Exception as error:
                log.exception("a request for a frame could not be served")
                transfer.refused = f"the server failed: {first_line(error)}"

        self._threads.submit(run)

    def _answer(self, transfer: "_Call", message: Message) -> None:
        kind, names = message.kind, bytes(message.body).decode("ascii").split("\n") if message.body else []
        if kind == "find":
            with self._listing:
                transfer.answer = {"place": self.store.find(names)}
        elif kind == "receipts":
            found = self.store.receipts(names)
            transfer.answer = {name: [one.fetch, one.decode, one.sent_bytes] for name, one in found.items()}
        elif kind == "discard":
            self.store.discard(message["name"])
            transfer.answer = {}
            self.say_line(f"frame {message['name'][:8]} discarded: a reader found it damaged")
        else:
            receipt = Receipt(message["fetch"], message["decode"], message["sent_bytes"])
            self.store.acknowledge(message["name"], receipt)
            transfer.answer = {}

    def _read(self, transfer: "_Download", name: str, most: int) -> None:
        try:
            data = self.store.get(name, most)
        except FrameError as error:  # not what is meant by no: the client has to know that it is damaged
            transfer.first = {"damaged": first_line(error)}
            transfer.out.complete()
            return
        transfer.out.put(data, wait=False)
        transfer.out.complete()
        transfer.first = {"bytes": len(data)}

    def _write(self, transfer: "_Upload", name: str) -> None:
        began = time.monotonic()
        size = self.store.put(name, self._paced(transfer.incoming))
        transfer.answer = {"bytes": size}
        took = time.monotonic() - began
        self._said(name, "stored", size, took)

    def _said(self, name: str, what: str, size: int, seconds: float) -> None:
        self.say_line(f"frame {name[:8]} {what}: {size / 1e6:.2f} MB in {1e3 * seconds:.0f} ms")

    def _paced(self, incoming: Incoming) -> Iterator[memoryview]:
        """Chunks as a link of the shaper's rate would let them through."""
        for chunk, arrived in incoming.chunks():
            through = self._upwards.reserve(len(chunk), arrived)
            while (left := through - time.monotonic()) > 0:
                if incoming.failed:
                    raise LinkError(incoming.failed)
                time.sleep(min(left, _LOOK))
            yield chunk


class _Call(Transfer):
    """A question with an answer of one message."""

    answer: Mapping[str, Any] | None = None

    def advance(self, say: Say, shaper: Shaper) -> float:
        if self.answer is not None and not self.complete:
            self.complete = say(self, "answer", values=dict(self.answer))
        return math.inf


class _Upload(_Call):
    """A frame that comes from a client: credits are said until it is kept."""

    def __init__(self, peer: bytes, request: str, now: float, incoming: Incoming) -> None:
        super().__init__(peer, request, now)
        self.incoming = incoming
        self._told = (-1, -1)

    def hear(self, message: Message, now: float) -> None:
        if message.kind == "piece":
            self.incoming.add(message.body)
        elif message.kind == "end":
            self.incoming.end(message["bytes"])
        else:
            super().hear(message, now)

    def advance(self, say: Say, shaper: Shaper) -> float:
        state = self.incoming.received, self.incoming.used
        if state != self._told and say(self, "credit", received=state[0], used=state[1]):
            self._told = state
        return super().advance(say, shaper)

    def close(self, reason: str) -> None:
        self.incoming.fail(reason)


class _Download(Sending):
    """A frame that goes to a client, its size first."""

    first: Mapping[str, Any] | None = None

    def __init__(self, peer: bytes, request: str, now: float, out: Outgoing, said: Callable[..., None]) -> None:
        super().__init__(peer, request, now, out)
        self._said = said

    def announcement(self) -> tuple[str, Mapping[str, Any]] | None:
        return None if self.first is None else ("answer", {"values": dict(self.first)})

    def advance(self, say: Say, shaper: Shaper) -> float:
        # Chunks may be there before their announcement is.
        return super().advance(say, shaper) if self.announced or self.first is not None else math.inf

    def ending(self) -> Mapping[str, float]:
        return {"prefill": 0.0, "encode": 0.0, "queue": 0.0}

    def hear(self, message: Message, now: float) -> None:
        super().hear(message, now)
        if self.complete:
            self._said("sent", self.out.sent, self.out.busy)
