"""``KVClient``: fetches the KV cache of a prompt from a server, decoding layers as they arrive."""

import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import receive
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.keys import Keys, secure_client
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.link import LOOPBACK, Incoming, LinkError, LinkSettings
from diffkv_repro.kvserve.messages import MOST_HEADER, Message, MessageError, pack, unpack
from diffkv_repro.kvserve.store_keys import block_digests, prompt_digest
from diffkv_repro.kvserve.terms import Ask, Fetched, Stages

_MOST_MESSAGE = 1 << 21
_SLACK = 1 << 20  # headers, scales


class KVClient:
    """One connection to a server, for one request at a time. Raises LinkError; never waits longer than its settings.

    ``keys`` of None has to be asked for: nothing is then encrypted, and nobody is who he says.
    """

    def __init__(
        self, layout: KVLayout, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        assets: Assets | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.endpoint, self.settings, self.assets = layout, endpoint, settings or LinkSettings(), assets
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing waits for a server that is not there
        self._socket.maxmsgsize = _MOST_MESSAGE + MOST_HEADER
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1000
        if keys is not None:
            secure_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        self._connected = False
        self._problem = "no server answers there"
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"{endpoint!r} is no address: {error}") from error

    def close(self) -> None:
        """Let the connection go."""
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)  # an open one would keep the context from ending
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> "KVClient":
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

    def fetch(self, ask: Ask) -> Fetched:
        """The cache of ``ask.ids``, or of a first part of them (a prefix store's).

        Raises LinkError for a server that is away, silent, or refuses, and FrameError for a frame that is damaged, of
        another model or of another prompt. Whatever comes later of this request is ignored.
        """
        started = time.monotonic()
        self.connect()
        transfer = _Fetch(self, ask, started)
        try:
            return transfer.run()
        except (LinkError, FrameError) as error:
            with suppress(zmq.ZMQError, MessageError):
                self._send("cancel", transfer.id, reason=first_line(error)[:200])
            raise

    def _send(self, kind: str, request: str, body: bytes = b"", **fields: Any) -> None:
        try:
            self._socket.send_multipart(pack(kind, request, body, **fields), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LinkError(f"the connection to {self.endpoint} is lost") from error

    def _next(self, milliseconds: int) -> Message | None:
        if not self._socket.poll(milliseconds):
            return None
        try:
            return unpack(self._socket.recv_multipart(zmq.NOBLOCK))
        except MessageError as error:
            raise LinkError(f"{self.endpoint} does not speak this protocol: {error}") from error


class _Fetch:
    """One request under way."""

    def __init__(self, client: KVClient, ask: Ask, started: float) -> None:
        self.client, self.ask, self.started = client, ask, started
        self.id = uuid.uuid4().hex
        raw = client.layout.raw_bytes(2 * len(ask.ids))
        window = client.settings.window_bytes
        self.incoming = Incoming(window, raw + _SLACK, overlap=ask.overlap)
        self.start: Message | None = None
        self.end: Message | None = None
        self.layers: list = []
        self.decode = 0.0
        self.error: Exception | None = None
        self.decoder: threading.Thread | None = None

    def run(self) -> Fetched:
        client, ask, given = self.client, self.ask, self.client.settings
        client._send(
            "ask", self.id, np.asarray(ask.ids, dtype="<u4").tobytes(), tokens=len(ask.ids),
            model=client.layout.fingerprint.hex(), workload=ask.workload, slo=ask.slo, min_quality=ask.min_quality,
            recompute=ask.recompute, window=given.window_bytes, overlap=ask.overlap, options=dict(ask.options or {}),
        )  # fmt: skip
        try:
            self._receive_all()
        except BaseException as error:
            self.incoming.fail(first_line(error))
            raise
        finally:
            if self.decoder is not None:
                self.decoder.join(timeout=given.patience)
        return self._finished()

    def _receive_all(self) -> None:
        given = self.client.settings
        heard = said = time.monotonic()
        told = (0, 0)
        while True:
            message = self.client._next(1 if self.decoder is not None else 20)
            now = time.monotonic()
            if message is not None and message.request == self.id:
                heard = now
                self._take(message)
                if message.kind == "piece" and self.client._socket.poll(0):
                    continue  # one acknowledgement for all that is here
            if self.error is not None:
                raise self.error
            state = (self.incoming.received, self.incoming.used)
            if state != told or now - said > given.heartbeat:
                self.client._send("credit", self.id, received=state[0], used=state[1])
                told, said = state, now
            if self.end is not None and self.decoder is not None and not self.decoder.is_alive():
                if self.error is not None:
                    raise self.error
                return
            if now - heard > given.patience:
                raise LinkError(f"{self.client.endpoint} was silent for {given.patience:g} s")
            if now - self.started > given.deadline:
                raise LinkError(f"not finished within {given.deadline:g} s")

    def _take(self, message: Message) -> None:
        if message.kind == "refuse":
            raise LinkError(f"refused: {message['reason']}")
        if message.kind == "start" and self.start is None:
            if not 1 <= message["tokens"] <= len(self.ask.ids):
                raise LinkError(
                    f"a cache of {message['tokens']} tokens was offered; {len(self.ask.ids)} were asked for"
                )
            self.start = message
            self.decoder = threading.Thread(target=self._decode, name="kv-decode", daemon=True)
            self.decoder.start()
        elif message.kind == "piece" and self.start is not None:
            self.incoming.add(message.body)
        elif message.kind == "end" and self.start is not None and self.end is None:
            self.incoming.end(message["bytes"])
            self.end = message
        elif message.kind != "alive":
            raise LinkError(f"{self.client.endpoint} said {message.kind} out of turn")

    def _check(self, header: Header) -> None:
        tokens, whole, ids = self.start["tokens"], self.start["whole"], self.ask.ids
        if header.tokens != whole or header.start:
            raise FrameError(f"a frame of {header.tokens} tokens from {header.start}; {whole} from 0 were announced")
        given = header.metadata
        if whole == tokens and given.get("prompt") == prompt_digest(ids[:tokens]):
            return
        block, blocks = given.get("block"), given.get("blocks")
        if not isinstance(block, int) or block < 1 or tokens % block or not isinstance(blocks, list):
            raise FrameError("a frame of another prompt")
        if blocks[tokens // block - 1 : tokens // block] != block_digests(ids[:tokens], block)[-1:]:
            raise FrameError("a frame of another prompt")

    def _decode(self) -> None:
        incoming, began = self.incoming, time.perf_counter()
        try:
            raw = self.client.layout.raw_bytes(2 * len(self.ask.ids))
            read = receive(incoming.read, self.client.layout, assets=self.client.assets, limit=raw, check=self._check)
            self.layers = list(read)
            if not incoming.at_end():
                raise FrameError("bytes follow the frame")
        except Exception as error:
            self.error = error if isinstance(error, FrameError) else FrameError(first_line(error))
        self.decode = time.perf_counter() - began - incoming.waited

    def _finished(self) -> Fetched:
        client, end = self.client, self.end
        total = time.monotonic() - self.started
        client._send("done", self.id, decode=max(0.0, self.decode))
        send = 0.0
        until = time.monotonic() + min(1.0, client.settings.patience)
        while time.monotonic() < until:  # a courtesy: without it the request is complete all the same
            message = client._next(20)
            if message is not None and message.request == self.id and message.kind == "receipt":
                send = message["send"]
                break
        stages = Stages(end["prefill"], end["encode"], end["queue"], send, max(0.0, self.decode), total)
        start = self.start
        raw = client.layout.raw_bytes(start["whole"])
        kv = KV(tuple(self.layers)).first(start["tokens"])
        return Fetched(kv, start["profile"], start["why"], start["predicted"], stages, end["bytes"], raw)
