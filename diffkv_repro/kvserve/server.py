"""``KVServer``: answers requests for a KV cache with a frame, streamed piece by piece; a provider says which.

One thread owns the socket, another computes and encodes, request after request. Requests are decided by a provider:
that of a prefill worker runs the model and compresses, that of a prefix store reads what it has.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.goodput import GoodputEstimator
from diffkv_repro.kvserve.keys import Keys
from diffkv_repro.kvserve.link import LOOPBACK, LinkError, LinkSettings, Outgoing
from diffkv_repro.kvserve.link_server import LinkServer
from diffkv_repro.kvserve.link_transfers import Sending
from diffkv_repro.kvserve.messages import MOST_TOKENS, Message
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.terms import Offer, Provider, Refusal, Request, Served

log = logging.getLogger(__name__)

_TELLING = 1 << 18  # fewer bytes say more about latency than about bandwidth


class KVServer(LinkServer):
    """A :class:`LinkServer` of what ``provider`` offers; ``experiment`` lets clients choose profile and rate."""

    opening = frozenset({"ask"})

    def __init__(
        self, provider: Provider, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        shaper: Shaper | None = None, experiment: bool = False, on_served: Callable[[Served], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(keys=keys, endpoint=endpoint, settings=settings, shaper=shaper)
        self.provider, self.experiment = provider, experiment
        self.goodput = GoodputEstimator(least_bytes=_TELLING)
        self._on_served = on_served
        self._jobs: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        worker = threading.Thread(target=self._work, name="kv-encode", daemon=True)
        worker.start()
        try:
            yield
        finally:
            self._jobs.put(None)
            worker.join(timeout=5)

    def begin(self, peer: bytes, message: Message, now: float) -> "_Answer":
        request = self._request(message)
        window = min(message["window"], self.settings.window_bytes)
        out = Outgoing(window, min(self.settings.chunk_bytes, window))
        transfer = _Answer(peer, message.request, now, out, request, self._served)
        self._jobs.put(transfer)
        return transfer

    def _request(self, message: Message) -> Request:
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

    def _served(self, transfer: "_Answer", report: Served) -> None:
        self.goodput.acknowledge(report.sent_bytes, report.send)
        self.say(transfer, "receipt", send=report.send, observed=report.observed)
        try:
            self.provider.served(report)
            if self._on_served is not None:
                self._on_served(report)
        except Exception:
            log.exception("a finished transfer could not be learnt from")

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

    def _encode(self, transfer: "_Answer") -> None:
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


class _Answer(Sending):
    """A KV cache on its way, ``served`` called with what it took when the client has decoded it."""

    def __init__(
        self, peer: bytes, request_id: str, now: float, out: Outgoing, request: Request,
        served: Callable[["_Answer", Served], None],
    ) -> None:  # fmt: skip
        super().__init__(peer, request_id, now, out)
        self.request, self._served = request, served
        self.offer: Offer | None = None
        self.picked = self.decided = self.encode = 0.0

    def announcement(self) -> tuple[str, Mapping[str, Any]] | None:
        given = self.offer
        if given is None:
            return None
        names = ("profile", "why", "predicted", "tokens", "whole")
        return "start", {name: getattr(given, name) for name in names}

    def ending(self) -> Mapping[str, float]:
        return {"prefill": self.offer.prefill, "encode": self.encode, "queue": self.picked - self.asked}

    def hear(self, message: Message, now: float) -> None:
        super().hear(message, now)
        if not self.complete:
            return
        out, offer = self.out, self.offer
        report = Served(
            offer, offer.prefill, self.encode, self.picked - self.asked, out.busy, message["decode"],
            offer.prefill + now - self.decided, out.sent,
        )  # fmt: skip
        self._served(self, report)
