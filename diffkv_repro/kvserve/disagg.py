"""Disaggregated serving: a prefill worker computes and compresses caches, a decode worker goes on from them.

Whatever happens to the other side or to the link, a decode worker completes each request once: what does not arrive
whole and in time it computes itself.
"""

import io
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.controller import Controller, ControllerSettings, Library
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.frame import receive
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile, ServiceContext
from diffkv_repro.kvserve.layout import KV
from diffkv_repro.kvserve.link import LinkError
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quality import Continuation
from diffkv_repro.kvserve.sources import Source
from diffkv_repro.kvserve.store_keys import prompt_digest
from diffkv_repro.kvserve.terms import Ask, Fetched, Offer, Refusal, Request, Served, prompt_of
from diffkv_repro.models.zoo import LoadedModel

PLAIN = Profile()


class PrefillWorker:
    """Provider of a prefill worker: computes the cache and sends it by the profile that the controller chooses.

    ``profiles`` by name; ``measured`` says what they cost, by raw bytes, as :func:`measure_streams` finds it. No
    compression is always there, as ``none``. Where the SLO is not expected to be kept the request is refused, and the
    decode side computes for itself. A request's ``options`` may name a ``profile`` (experiments).
    """

    def __init__(
        self, source: Source, profiles: Mapping[str, Profile], measured: Library,
        settings: ControllerSettings | None = None,
    ) -> None:  # fmt: skip
        self.controller = Controller(measured, settings)
        names = {one.name for those in self.controller.profiles.values() for one in those}
        if names - set(profiles):
            raise ValueError(f"profiles lack {', '.join(sorted(names - set(profiles)))}; they have {list(profiles)}")
        self.source = source
        self.profiles = {NO_COMPRESSION.name: PLAIN} | {name: profiles[name] for name in profiles if name in names}

    def offer(self, request: Request, bandwidth: float | None) -> Offer:
        """Prefill, decide, and the pieces of the frame."""
        layout = self.source.layout
        if request.model != layout.fingerprint.hex():
            raise Refusal(f"another model, dtype or rotary embedding: this worker serves {layout}")
        try:
            computed = self.source.compute(request.ids)
        except ValueError as error:
            raise Refusal(first_line(error)) from error
        tokens = len(request.ids)
        context = ServiceContext(
            request.workload, layout.raw_bytes(tokens), bandwidth, request.slo, min(request.min_quality, 1e9),
            computed.seconds,
        )  # fmt: skip
        forced = request.options.get("profile")
        decision = self.controller.decide(context) if forced is None else self._forced(forced, context)
        if math.isfinite(request.slo) and decision.predicted is not None and not decision.keeps_slo:
            raise Refusal(f"the SLO of {request.slo:g} s cannot be kept: {decision.predicted:.3g} s expected")
        name = decision.profile.name
        digest = prompt_digest(request.ids)
        pieces = self.profiles[name].stream(
            computed.kv.layers, layout, tokens, assets=computed.assets, metadata={"prompt": digest}
        )
        predicted = decision.predicted or 0.0
        return Offer(pieces, tokens, name, decision.why[:4000], predicted, computed.seconds, digest, decision)

    def _forced(self, name: str, context: ServiceContext) -> Decision:
        if name not in self.profiles:
            raise Refusal(f"unknown profile {name!r}; there are {', '.join(self.profiles)}")
        known = {one.name: one for those in self.controller.profiles.values() for one in those}
        return Decision(0, known.get(name, NO_COMPRESSION), "asked for", context)

    def served(self, report: Served) -> None:
        """Learn: T_obs holds prefill, encode, send and decode at the far side."""
        decision = report.offer.subject
        if isinstance(decision, Decision) and decision.number:
            self.controller.observe(decision, report.observed, bandwidth=report.goodput)


def measure_streams(
    profiles: Mapping[str, Profile], source: Source, ids: Sequence[int], *, repeats: int = 3,
    quality: Mapping[str, Mapping[str, float]] | None = None,
) -> list[MeasuredProfile]:  # fmt: skip
    """What each profile costs on the way a worker takes: pieces one by one, decoded one by one; medians, in turns.

    Equation 1 has no cost for an uncompressed cache. Here its frame has one (a checksum, a copy), which every profile
    pays too, so it belongs to T_model; codec times are those above it. ``quality`` by profile and workload.
    """
    computed, layout = source.compute(ids), source.layout
    raw = layout.raw_bytes(len(ids))
    every = {NO_COMPRESSION.name: PLAIN} | dict(profiles)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    sizes = {}
    with one_thread():
        for _ in range(repeats + 1):
            for name, profile in every.items():
                started = time.perf_counter()
                pieces = list(profile.stream(computed.kv.layers, layout, len(ids), assets=computed.assets))
                between = time.perf_counter()
                data = b"".join(pieces)
                sizes[name] = len(data)
                began = time.perf_counter()
                list(receive(io.BytesIO(data).read, layout, assets=computed.assets))
                seconds[name].append((between - started, time.perf_counter() - began))
    medians = {name: [statistics.median(way) for way in zip(*rows[1:], strict=True)] for name, rows in seconds.items()}
    base = medians[NO_COMPRESSION.name]
    found = []
    for name in profiles:
        encode, decode = (raw / max(own - plain, 1e-9) for own, plain in zip(medians[name], base, strict=True))
        found.append(MeasuredProfile(name, raw / sizes[name], encode, decode, (quality or {}).get(name, {"*": 1.0})))
    return found


@dataclass(frozen=True)
class Prompted:
    """A request that a decode worker has completed: the cache it goes on from, and how it came.

    ``fetched`` is None where the cache was recomputed here, for ``reason``. ``seconds`` until the cache was there.
    """

    kv: KV
    seconds: float
    fetched: Fetched | None = None
    reason: str = ""

    @property
    def how(self) -> str:
        """``transfer`` or ``recompute``."""
        return "transfer" if self.fetched is not None else "recompute"


class DecodeWorker:
    """Gets caches from a server and, where that fails for whatever reason, from its own model: each request once.

    Of a prompt of which only a prefix arrives, the rest is computed here.
    """

    def __init__(self, source: Source, client: KVClient | None) -> None:
        if client is not None and client.layout != source.layout:
            raise ValueError(f"the client expects {client.layout}, the model here has {source.layout}")
        self.source, self.client = source, client

    def complete(self, ask: Ask) -> Prompted:
        """The cache of all of ``ask.ids``. Raises ValueError for ids that are no tokens of the model."""
        started = time.monotonic()
        reason = "there is no server"
        if self.client is not None:
            try:
                fetched = self.client.fetch(ask)
                kv = fetched.kv
                if kv.tokens < len(ask.ids):
                    kv = self.source.extend(kv, ask.ids)
                return Prompted(kv, time.monotonic() - started, fetched)
            except (LinkError, FrameError) as error:
                reason = first_line(error)
        computed = self.source.compute(ask.ids)
        return Prompted(computed.kv, time.monotonic() - started, reason=reason)


def generate(loaded: LoadedModel, kv: KV, last: int, tokens: int) -> Iterator[int]:
    """Greedy tokens after a prompt of which ``kv`` holds all but the ``last`` token; ends early at the end of text."""
    end = loaded.model.generation_config.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    with one_thread():
        going = Continuation(loaded, kv)
        for _ in range(tokens):
            last = int(going.step(torch.tensor([[last]]))[-1].argmax())
            yield last
            if last in ends:
                return


def greedy(
    loaded: LoadedModel, worker: DecodeWorker, ids: Sequence[int], tokens: int, **terms: Any
) -> tuple[Prompted, list[int]]:
    """A prompt through ``worker`` and its greedy continuation; ``terms`` are those of :class:`Ask`."""
    done = worker.complete(Ask(prompt_of(ids), **terms))
    return done, list(generate(loaded, done.kv, int(ids[-1]), tokens))
