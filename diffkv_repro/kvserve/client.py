"""``KVClient``: fetches the KV cache of a prompt from a server, decoding layers as they arrive."""

import threading
import time

import numpy as np

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.connection import Connection, Exchange
from diffkv_repro.kvserve.frame import receive
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.keys import Keys
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.link import LOOPBACK, Incoming, LinkError, LinkSettings
from diffkv_repro.kvserve.messages import Message
from diffkv_repro.kvserve.store_keys import block_digests, prompt_digest
from diffkv_repro.kvserve.terms import Ask, Fetched, Stages

_SLACK = 1 << 20  # headers, scales


class KVClient(Connection):
    """A :class:`Connection` to a :class:`KVServer`, for one request at a time."""

    def __init__(
        self, layout: KVLayout, *, keys: Keys | None, endpoint: str = LOOPBACK, settings: LinkSettings | None = None,
        assets: Assets | None = None,
    ) -> None:  # fmt: skip
        super().__init__(keys=keys, endpoint=endpoint, settings=settings)
        self.layout, self.assets = layout, assets

    def fetch(self, ask: Ask) -> Fetched:
        """The cache of ``ask.ids``, or of a first part of them (a prefix store's).

        Raises LinkError for a server that is away, silent, or refuses, and FrameError for a frame that is damaged, of
        another model or of another prompt. Whatever comes later of this request is ignored.
        """
        transfer = _Fetch(self, ask)
        self.connect()
        try:
            return transfer.run()
        except (LinkError, FrameError) as error:
            transfer.give_up(first_line(error))
            raise


class _Fetch(Exchange):
    """One request for a KV cache."""

    connection: KVClient

    def __init__(self, client: KVClient, ask: Ask) -> None:
        super().__init__(client)
        self.ask = ask
        raw = client.layout.raw_bytes(2 * len(ask.ids))
        self.incoming = Incoming(client.settings.window_bytes, raw + _SLACK, overlap=ask.overlap)
        self.start: Message | None = None
        self.end: Message | None = None
        self.layers: list = []
        self.decode = 0.0
        self.error: Exception | None = None
        self.decoder: threading.Thread | None = None

    def run(self) -> Fetched:
        layout, given, ask = self.connection.layout, self.connection.settings, self.ask
        self.say(
            "ask", np.asarray(ask.ids, dtype="<u4").tobytes(), tokens=len(ask.ids), model=layout.fingerprint.hex(),
            workload=ask.workload, slo=ask.slo, min_quality=ask.min_quality, recompute=ask.recompute,
            window=given.window_bytes, overlap=ask.overlap, options=dict(ask.options or {}),
        )  # fmt: skip
        try:
            self.listen()
        except BaseException as error:
            self.incoming.fail(first_line(error))
            raise
        finally:
            if self.decoder is not None:
                self.decoder.join(timeout=given.patience)
        return self._finished()

    def finished(self) -> bool:
        decoded = self.end is not None and self.decoder is not None and not self.decoder.is_alive()
        if self.error is not None:
            raise self.error
        return decoded

    def acknowledged(self) -> tuple[int, int]:
        return self.incoming.received, self.incoming.used

    def take(self, message: Message) -> None:
        if message.kind == "start" and self.start is None:
            if not 1 <= message["tokens"] <= len(self.ask.ids):
                raise LinkError(
                    f"a cache of {message['tokens']} tokens was offered; {len(self.ask.ids)} were asked for"
                )
            self.start = message
            self.milliseconds = 1
            self.decoder = threading.Thread(target=self._decode, name="kv-decode", daemon=True)
            self.decoder.start()
        elif message.kind == "piece" and self.start is not None:
            self.incoming.add(message.body)
        elif message.kind == "end" and self.start is not None and self.end is None:
            self.incoming.end(message["bytes"])
            self.end = message
        else:
            raise self.out_of_turn(message)

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
        client = self.connection
        try:
            raw = client.layout.raw_bytes(2 * len(self.ask.ids))
            read = receive(incoming.read, client.layout, assets=client.assets, limit=raw, check=self._check)
            self.layers = list(read)
            if not incoming.at_end():
                raise FrameError("bytes follow the frame")
        except Exception as error:
            self.error = error if isinstance(error, FrameError) else FrameError(first_line(error))
        self.decode = time.perf_counter() - began - incoming.waited

    def _finished(self) -> Fetched:
        client, end = self.connection, self.end
        total = time.monotonic() - self.started
        self.say("done", decode=max(0.0, self.decode))
        send = 0.0
        until = time.monotonic() + min(1.0, client.settings.patience)
        while time.monotonic() < until:  # a courtesy: without it the request is complete all the same
            message = client.hear(20)
            if message is not None and message.request == self.id and message.kind == "receipt":
                send = message["send"]
                break
        stages = Stages(end["prefill"], end["encode"], end["queue"], send, max(0.0, self.decode), total)
        start = self.start
        raw = client.layout.raw_bytes(start["whole"])
        kv = KV(tuple(self.layers)).first(start["tokens"])
        return Fetched(kv, start["profile"], start["why"], start["predicted"], stages, end["bytes"], raw)
