"""``LinkServer``: the socket of a server, which lets clients in by their keys and follows their transfers."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from diffkv_repro.kvserve.keys import Keys, secure_server
from diffkv_repro.kvserve.link import LOOPBACK, LinkError, LinkSettings, require_address
from diffkv_repro.kvserve.link_transfers import Transfer
from diffkv_repro.kvserve.messages import MOST_HEADER, MOST_TOKENS, OPENING, Message, MessageError, pack, unpack
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.sockets import Sockets
from diffkv_repro.kvserve.terms import Refusal

log = logging.getLogger(__name__)

_LOOPBACKS = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
_MOST_WAITING = 64
_IDLE_MS = 20


def require_free(endpoint: str, keys: Keys | None) -> None:
    """Raise LinkError where a server could not listen now: a port in use, no address of this host, or none at all, or
    one that others reach and ``keys`` are None."""
    _require_allowed(endpoint, keys)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        _bind(socket, endpoint)


def _require_allowed(endpoint: str, keys: Keys | None) -> None:
    require_address(endpoint)
    if keys is None and not endpoint.startswith(_LOOPBACKS):
        raise LinkError(f"without keys a server listens on the loopback alone, not on {endpoint}")


def _bind(socket: zmq.Socket, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise LinkError(f"cannot listen on {endpoint}: {error.strerror}") from error


class LinkServer(ABC):
    """Serves until :meth:`stop`. ``endpoint`` is on the loopback unless given; with ``keys`` only clients whose public
    key is known get in, and all is encrypted. ``keys`` of None has to be asked for: it lets everybody on this host in.

    ``shaper`` is the link in experiments. One thread owns the socket: that of :meth:`run`.
    """

    opening: ClassVar[frozenset[str]]

    def __init__(
        self, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        shaper: Shaper | None = None,
    ) -> None:  # fmt: skip
        _require_allowed(endpoint, keys)
        self.settings, self.shaper = settings or LinkSettings(), shaper or Shaper()
        self._transfers: dict[tuple[bytes, str], Transfer] = {}
        self._stop = threading.Event()
        self._sockets = Sockets(self)
        self._socket = self._sockets.open(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.sndhwm = 0  # credits bound what is under way
        self._socket.maxmsgsize = MOST_HEADER + 4 * MOST_TOKENS
        try:
            if keys is not None:
                authenticator = ThreadAuthenticator(self._sockets.context)
                authenticator.start()
                self._sockets.keep(authenticator)
                authenticator.configure_curve(domain="*", location=str(keys.clients))
                secure_server(self._socket, keys)
            _bind(self._socket, endpoint)
        except (LinkError, zmq.ZMQError):
            self._sockets.close()
            raise
        self.endpoint = self._socket.last_endpoint.decode()

    @abstractmethod
    def begin(self, peer: bytes, message: Message, now: float) -> Transfer:
        """The transfer that a message of one of the kinds in ``opening`` asks for. Raises Refusal."""

    def at_work(self) -> AbstractContextManager[Any]:
        """What has to run beside the socket's thread while it serves."""
        return nullcontext()

    def stop(self) -> None:
        """Let :meth:`run` return; safe from any thread and from a signal."""
        self._stop.set()

    def run(self) -> None:
        """Answer requests until stopped."""
        try:
            with self.at_work():
                self._serve()
        finally:
            self._sockets.close()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(self._advance()):
                    self._receive()
                self._tend()
        finally:
            for transfer in list(self._transfers.values()):
                transfer.close("the server stops")

    def __enter__(self) -> Self:
        """Serve from a thread of this process during the block."""
        self._thread = threading.Thread(target=self.run, name="kv-link", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(timeout=10)

    def say(self, transfer: Transfer, kind: str, body: Any = b"", **fields: Any) -> bool:
        """Say a message to a transfer's client; where the client is gone, the transfer is dropped."""
        transfer.said = time.monotonic()
        if self._say_to(transfer.peer, pack(kind, transfer.id, body, **fields)):
            return True
        self._drop(transfer, "the client is gone")
        return False

    def _advance(self) -> int:
        """Say what may be said now; milliseconds until there may be more."""
        wait = math.inf
        for transfer in list(self._transfers.values()):
            wait = min(wait, transfer.advance(self.say, self.shaper))
            if transfer.refused:
                self.say(transfer, "refuse", reason=transfer.refused)
                self._drop(transfer, transfer.refused)
            elif transfer.complete:
                self._forget(transfer)
        waiting = 1 if self._transfers else _IDLE_MS
        return max(0, min(waiting, math.ceil(1e3 * wait)) if wait < math.inf else waiting)

    def _receive(self) -> None:
        for _ in range(256):
            try:
                peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(peer, unpack(parts))
            except MessageError as error:
                log.warning("a client sent what is no message: %s", error)

    def _handle(self, peer: bytes, message: Message) -> None:
        now = time.monotonic()
        transfer = self._transfers.get((peer, message.request))
        if transfer is None:
            if message.kind in OPENING:  # others are of a request that was given up
                self._begin(peer, message, now)
            return
        transfer.heard = now
        try:
            if message.kind == "cancel":
                self._drop(transfer, f"the client gave up: {message['reason']}")
            else:
                transfer.hear(message, now)
        except LinkError as error:
            self._drop(transfer, str(error))

    def _begin(self, peer: bytes, message: Message, now: float) -> None:
        try:
            if message.kind not in self.opening:
                raise Refusal(f"{message.kind} is for another server: this one knows {', '.join(sorted(self.opening))}")
            if len(self._transfers) >= _MOST_WAITING:
                raise Refusal(f"busy: {_MOST_WAITING} requests wait already")
            self._transfers[peer, message.request] = self.begin(peer, message, now)
        except Refusal as error:
            self._say_to(peer, pack("refuse", message.request, reason=str(error)))

    def _tend(self) -> None:
        now = time.monotonic()
        for transfer in list(self._transfers.values()):
            if now - transfer.heard > self.settings.patience:
                self._drop(transfer, f"the client was silent for {self.settings.patience:g} s")
            elif now - transfer.asked > self.settings.deadline:
                self._drop(transfer, f"not finished within {self.settings.deadline:g} s")
            elif now - transfer.said > self.settings.heartbeat:
                self.say(transfer, "alive")

    def _forget(self, transfer: Transfer) -> bool:
        return self._transfers.pop((transfer.peer, transfer.id), None) is not None

    def _drop(self, transfer: Transfer, reason: str) -> None:
        if self._forget(transfer):
            transfer.close(reason)
            log.info("request %s dropped: %s", transfer.id, reason)

    def _say_to(self, peer: bytes, parts: list[Any]) -> bool:
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("nothing can be said to a client: %s", error)
            return False
        return True
