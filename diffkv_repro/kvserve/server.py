"""``KVServer``: answers requests for a KV cache with a frame, streamed piece by piece; a provider says which.

One thread owns the socket, another computes and encodes, request after request. Requests are decided by a provider:
that of a prefill worker runs the model and compresses, that of a prefix store reads what it has.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.goodput import GoodputEstimator
from diffkv_repro.kvserve.keys import Keys, secure_server
from diffkv_repro.kvserve.link import LOOPBACK, LinkError, LinkSettings, Outgoing
from diffkv_repro.kvserve.messages import MOST_HEADER, MOST_TOKENS, Message, MessageError, pack, unpack
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.terms import Offer, Provider, Refusal, Request, Served

log = logging.getLogger(__name__)

_LOOPBACKS = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
_MOST_WAITING = 64
_TELLING = 1 << 18  # fewer bytes say more about latency than about bandwidth
_IDLE_MS = 20


@dataclass
class _Transfer:
    peer: bytes
    id: str
    request: Request
    out: Outgoing
    asked: float
    heard: float
    said: float
    offer: Offer | None = None
    picked: float = 0.0
    decided: float = 0.0
    encode: float = 0.0
    announced: bool = False
    ended: bool = False
    refused: str = ""


class KVServer:
    """Serves until :meth:`stop`. ``endpoint`` is on the loopback unless given; with ``keys`` only clients whose public
    key is known get in, and all is encrypted. ``keys`` of None has to be asked for: it lets everybody on this host in.

    ``shaper`` is the link in experiments; ``experiment`` lets clients choose profile and rate.
    """

    def __init__(
        self, provider: Provider, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        shaper: Shaper | None = None, experiment: bool = False, on_served: Callable[[Served], None] | None = None,
    ) -> None:  # fmt: skip
        if keys is None and not endpoint.startswith(_LOOPBACKS):
            raise LinkError(f"without keys a server listens on the loopback alone, not on {endpoint}")
        self.provider, self.settings = provider, settings or LinkSettings()
        self.shaper, self.experiment = shaper or Shaper(), experiment
        self.goodput = GoodputEstimator(least_bytes=_TELLING)
        self._on_served = on_served
        self._transfers: dict[tuple[bytes, str], _Transfer] = {}
        self._jobs: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._authenticator = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.sndhwm = 0  # credits bound what is under way
        self._socket.maxmsgsize = MOST_HEADER + 4 * MOST_TOKENS
        try:
            if keys is not None:
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve(domain="*", location=str(keys.clients))
                secure_server(self._socket, keys)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._shut()
            raise LinkError(f"cannot bind {endpoint}: {error}") from error
        self.endpoint = self._socket.last_endpoint.decode()

    def stop(self) -> None:
        """Let :meth:`run` return; safe from any thread and from a signal."""
        self._stop.set()

    def run(self) -> None:
        """Answer requests until stopped."""
        worker = threading.Thread(target=self._work, name="kv-encode", daemon=True)
        worker.start()
        try:
            while not self._stop.is_set():
                if self._socket.poll(self._send()):
                    self._receive()
                self._tend()
        finally:
            for transfer in list(self._transfers.values()):
                transfer.out.close("the server stops")
            self._jobs.put(None)
            worker.join(timeout=5)
            self._shut()

    def __enter__(self) -> "KVServer":
        """Serve from a thread of this process during the block."""
        self._thread = threading.Thread(target=self.run, name="kv-link", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(timeout=10)

    def _shut(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(linger=0)
        self._context.term()

    # The socket's thread.

    def _send(self) -> int:
        """Send what may leave now; milliseconds until there may be more."""
        wait = math.inf
        for transfer in list(self._transfers.values()):
            if transfer.offer is not None and not transfer.announced:
                given = transfer.offer
                transfer.announced = self._say(
                    transfer, "start", profile=given.profile, why=given.why, predicted=given.predicted,
                    tokens=given.tokens, whole=given.whole,
                )  # fmt: skip
            for _ in range(32):
                now = time.monotonic()
                chunk, then = transfer.out.take(self.shaper, now)
                if chunk is None:
                    wait = min(wait, then - now)
                    break
                if not self._say(transfer, "piece", chunk):
                    break
            else:
                wait = 0
            if transfer.refused:
                self._say(transfer, "refuse", reason=transfer.refused)
                self._drop(transfer, transfer.refused)
            elif transfer.announced and not transfer.ended and transfer.out.finished:
                transfer.ended = self._say(
                    transfer, "end", bytes=transfer.out.sent, prefill=transfer.offer.prefill, encode=transfer.encode,
                    queue=transfer.picked - transfer.asked,
                )  # fmt: skip
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
        if message.kind == "ask":
            self._ask(peer, message, now)
            return
        transfer = self._transfers.get((peer, message.request))
        if transfer is None:  # of a request that was given up, or of none
            return
        transfer.heard = now
        try:
            if message.kind == "credit":
                transfer.out.credit(message["received"], message["used"], now)
            elif message.kind == "done":
                self._done(transfer, message["decode"], now)
            elif message.kind == "cancel":
                self._drop(transfer, f"the client gave up: {message['reason']}")
        except LinkError as error:
            self._drop(transfer, str(error))

    def _ask(self, peer: bytes, message: Message, now: float) -> None:
        try:
            request = self._request(message)
        except Refusal as error:
            self._say_to(peer, pack("refuse", message.request, reason=str(error)))
            return
        window = min(message["window"], self.settings.window_bytes)
        out = Outgoing(window, min(self.settings.chunk_bytes, window))
        transfer = _Transfer(peer, message.request, request, out, now, now, now)
        self._transfers[peer, message.request] = transfer
        self._jobs.put(transfer)

    def _request(self, message: Message) -> Request:
        if len(self._transfers) >= _MOST_WAITING:
            raise Refusal(f"busy: {_MOST_WAITING} requests wait already")
        count = message["tokens"]
        if not 1 <= count <= MOST_TOKENS or len(message.body) != 4 * count:
            raise Refusal(f"{count} tokens in {len(message.body)} bytes; 1 to {MOST_TOKENS} of 4 bytes are needed")
        if not message["window"]:
            raise Refusal("a window of 0 bytes; nothing could be sent")
        if message["options"] and not self.experiment:
            raise Refusal("options are for experiments: start the server with --experiment")
        ids = np.frombuffer(message.body, dtype="<u4").tolist()
        names = ("model", "workload", "slo", "min_quality", "recompute", "overlap", "options")
        return Request(tuple(ids), **{name: message[name] for name in names})

    def _done(self, transfer: _Transfer, decode: float, now: float) -> None:
        if not transfer.ended:
            raise LinkError("done was said before the end")
        out, offer = transfer.out, transfer.offer
        out.credit(out.sent, out.sent, now)
        report = Served(
            offer, offer.prefill, transfer.encode, transfer.picked - transfer.asked, out.busy, decode,
            offer.prefill + now - transfer.decided, out.sent,
        )  # fmt: skip
        self.goodput.acknowledge(report.sent_bytes, report.send)
        self._say(transfer, "receipt", send=report.send, observed=report.observed)
        self._transfers.pop((transfer.peer, transfer.id), None)
        try:
            self.provider.served(report)
            if self._on_served is not None:
                self._on_served(report)
        except Exception:
            log.exception("a finished transfer could not be learnt from")

    def _tend(self) -> None:
        now = time.monotonic()
        for transfer in list(self._transfers.values()):
            if now - transfer.heard > self.settings.patience:
                self._drop(transfer, f"the client was silent for {self.settings.patience:g} s")
            elif now - transfer.asked > self.settings.deadline:
                self._drop(transfer, f"not finished within {self.settings.deadline:g} s")
            elif now - transfer.said > self.settings.heartbeat:
                self._say(transfer, "alive")

    def _drop(self, transfer: _Transfer, reason: str) -> None:
        if self._transfers.pop((transfer.peer, transfer.id), None) is not None:
            transfer.out.close(reason)
            log.info("request %s dropped: %s", transfer.id, reason)

    def _say(self, transfer: _Transfer, kind: str, body: Any = b"", **fields: Any) -> bool:
        transfer.said = time.monotonic()
        if self._say_to(transfer.peer, pack(kind, transfer.id, body, **fields)):
            return True
        self._drop(transfer, "the client is gone")
        return False

    def _say_to(self, peer: bytes, parts: list[Any]) -> bool:
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("nothing can be said to a client: %s", error)
            return False
        return True

    # The encoder's thread.

    def _work(self) -> None:
        while (transfer := self._jobs.get()) is not None:
            try:
                self._encode(transfer)
            except LinkError:
                pass  # given up meanwhile
            except Refusal as error:
                transfer.refused = str(error) or "refused"
            except Exception as error:
                log.exception("a request could not be served")
                transfer.refused = f"the server failed: {first_line(error)}"

    def _encode(self, transfer: _Transfer) -> None:
        if transfer.out.closed:
            return
        transfer.picked = time.monotonic()
        request = transfer.request
        rate = request.options.get("rate", self.shaper.rate)
        if rate != self.shaper.rate:  # another link, of which nothing is known
            self.shaper.rate = rate
            self.goodput = GoodputEstimator(least_bytes=_TELLING)
        offer = self.provider.offer(request, self.goodput.bandwidth)
        transfer.decided = time.monotonic()
        transfer.offer = offer
        pieces, held = iter(offer.pieces), []
        while True:
            started = time.perf_counter()
            piece = next(pieces, None)
            transfer.encode += time.perf_counter() - started
            if piece is None:
                break
            if request.overlap:
                transfer.out.put(piece)
            else:
                held.append(piece)
        for piece in held:
            transfer.out.put(piece, wait=False)
        transfer.out.complete()
