"""The client's end of the link: one connection to a server, and the requests that go over it, one at a time."""

import time
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from diffkv_repro.kvserve.keys import Keys, secure_client
from diffkv_repro.kvserve.link import LOOPBACK, LinkError, LinkSettings, Refused, require_address
from diffkv_repro.kvserve.messages import MOST_HEADER, Message, MessageError, pack, unpack
from diffkv_repro.kvserve.sockets import Sockets

_MOST_MESSAGE = 1 << 21


class Connection:
    """A connection that is made again by itself. Raises LinkError; never waits longer than its settings.

    ``keys`` of None has to be asked for: nothing is then encrypted, and nobody is who he says.
    """

    def __init__(self, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None) -> None:
        require_address(endpoint)
        self.endpoint, self.settings = endpoint, settings or LinkSettings()
        self._sockets = Sockets(self)
        self._socket = self._sockets.open(zmq.DEALER)
        self._socket.immediate = True  # nothing waits for a server that is not there
        self._socket.maxmsgsize = _MOST_MESSAGE + MOST_HEADER
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        if keys is not None:
            secure_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        self._sockets.keep(self._monitor)
        self._connected = False
        self._problem = "no server answers there"
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"{endpoint!r} is no address: {error}") from error

    def close(self) -> None:
        """Let the connection go."""
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Wait until the server has let this client in. Raises LinkError with the reason after ``settings.connect``."""
        until = time.monotonic() + self.settings.connect
        self._events()
        while not self._connected:
            left = until - time.monotonic()
            if left <= 0:
                raise LinkError(f"no connection to {self.endpoint}: {self._problem}")
            if self._monitor.poll(max(1, int(1e3 * left))):
                self._events()

    def _events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                continue
            self._connected = False
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._problem = "the server does not know this client's key"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._problem = "the handshake failed: is the server's key the right one?"

    def say(self, kind: str, request: str, body: Any = b"", **fields: Any) -> None:
        """Send a message. Raises LinkError where the connection is lost."""
        try:
            self._socket.send_multipart(pack(kind, request, body, **fields), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LinkError(f"the connection to {self.endpoint} is lost") from error

    def hear(self, milliseconds: int) -> Message | None:
        """The next message, None where none comes in time."""
        if not self._socket.poll(milliseconds):
            return None
        try:
            return unpack(self._socket.recv_multipart(zmq.NOBLOCK))
        except MessageError as error:
            raise LinkError(f"{self.endpoint} does not speak this protocol: {error}") from error

    @property
    def waiting(self) -> bool:
        """Whether a message is here."""
        return bool(self._socket.poll(0))


class Exchange(ABC):
    """One request under way: says that it is there, hears, acknowledges, and gives up a server that is silent."""

    milliseconds = 20

    def __init__(self, connection: Connection) -> None:
        self.connection, self.started, self.id = connection, time.monotonic(), uuid.uuid4().hex

    @abstractmethod
    def take(self, message: Message) -> None:
        """Take in a message of this request. Raises LinkError for one that is out of turn."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether there is no more to come; called after each message, and between them."""

    def acknowledged(self) -> tuple[int, int]:
        """Bytes received, and used up."""
        return 0, 0

    def advance(self) -> None:  # noqa: B027 (most have nothing to say in between)
        """Say what may be said now."""

    def say(self, kind: str, body: Any = b"", **fields: Any) -> None:
        """Send a message of this request."""
        self.connection.say(kind, self.id, body, **fields)

    def listen(self) -> None:
        """Until :meth:`finished`. Raises LinkError for a server that refuses, is silent or takes too long."""
        given, at = self.connection.settings, self.connection.endpoint
        heard = said = time.monotonic()
        told = (0, 0)
        while not self.finished():
            self.advance()
            message = self.connection.hear(self.milliseconds)
            now = time.monotonic()
            if message is not None and message.request == self.id:
                heard = now
                if message.kind == "refuse":
                    raise Refused(f"refused: {message['reason']}")
                if message.kind != "alive":
                    self.take(message)
                if message.kind == "piece" and self.connection.waiting:
                    continue  # one acknowledgement for all that is here
            state = self.acknowledged()
            if state != told or now - said > given.heartbeat:
                self.say("credit", received=state[0], used=state[1])
                told, said = state, now
            if now - heard > given.patience:
                raise LinkError(f"{at} was silent for {given.patience:g} s")
            if now - self.started > given.deadline:
                raise LinkError(f"not finished within {given.deadline:g} s")

    def give_up(self, reason: str) -> None:
        """Tell the server that nobody waits any more, if it can be told."""
        with suppress(zmq.ZMQError, MessageError, LinkError):
            self.say("cancel", reason=reason[:200])

    def out_of_turn(self, message: Message) -> LinkError:
        """What to raise for a message that is not expected now."""
        return LinkError(f"{self.connection.endpoint} said {message.kind} out of turn")
