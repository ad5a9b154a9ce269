"""The scheduler's half of the vLLM connector: which frames a step loads and saves, and with which profile.

Needs no vLLM: it reads requests and scheduler outputs by the attributes that vLLM 0.32 and 0.33 give them.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.decision import Decision
from diffkv_repro.kvserve.frame_store import FrameStore, PromptKey, prompt_keys
from diffkv_repro.kvserve.goodput import GoodputEstimator
from diffkv_repro.kvserve.latency import ServiceContext
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.vllm_settings import ConnectorSettings

# Below "vllm", so that vLLM's own logging shows it.
log = logging.getLogger(f"vllm.{__name__}")
_MOST_PENDING, _MOST_LOST = 256, 1024
_POLL = 0.25  # seconds between looks for receipts
_AVOID = 60.0  # seconds for which a frame that could not be used is not tried again


@dataclass(frozen=True)
class Load:
    """Put tokens ``start`` to ``stop`` of a frame into a request's blocks."""

    request: str
    key: PromptKey
    start: int
    stop: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """Store the first tokens of a request's blocks with a profile of the library ("" for the one that is set)."""

    request: str
    key: PromptKey
    blocks: tuple[int, ...]
    profile: str = ""


@dataclass(frozen=True)
class Saved:
    """What a save took: seconds of encoding and of writing, and the frame's bytes."""

    name: str
    encode: float
    write: float
    sent_bytes: int


@dataclass(frozen=True)
class Report:
    """What a worker tells the scheduler of a step: frames stored, and names of frames that could not be used."""

    saved: tuple[Saved, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass
class _Request:
    keys: list[PromptKey]
    salt: str
    blocks: list[int] = field(default_factory=list)
    match: tuple[PromptKey, int] | None = None
    saved: bool = False


class Plans:
    """Follows requests from their arrival to their end. Nothing that a store does makes it raise: a frame that cannot
    be found is one that is not there."""

    def __init__(
        self, settings: ConnectorSettings, layout: KVLayout, store: FrameStore, block_size: int, *, saves: bool,
        loads: bool, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.settings, self.layout, self.store = settings, layout, store
        self.block_size, self.saves, self.loads = block_size, saves, loads
        self.library = settings.library()
        self.controller = self.library.controller() if self.library else None
        self.goodput = GoodputEstimator(stale_after=600.0, clock=clock)
        self._clock, self._polled = clock, -math.inf
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, Load] = {}
        self._decided: OrderedDict[str, Decision] = OrderedDict()
        self._awaited: OrderedDict[str, Saved] = OrderedDict()
        self._lost: OrderedDict[str, float] = OrderedDict()

    def match(self, request: Any, computed: int) -> int:
        """How many tokens beyond the ``computed`` ones a frame can give; the last token is always left to compute."""
        known = self._known(request)
        if known is None or not self.loads:
            return 0
        known.match = None
        since = self._clock() - _AVOID
        keys = [key for key in known.keys if self._lost.get(key.name, -math.inf) < since]
        most = request.num_tokens - 1
        useful = [key for key in keys if min(key.tokens, most) - computed >= self.settings.min_tokens]
        place = self._find([key.name for key in useful])
        if place is None:
            return 0
        known.match = useful[place], computed
        return min(useful[place].tokens, most) - computed

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Blocks were given to a request, of whose tokens ``external`` come from the frame that was matched."""
        known = self._known(request)
        if known is None:
            return
        known.blocks = list(blocks)
        if external > 0 and known.match is not None:
            key, start = known.match
            self._loads[request.request_id] = Load(
                request.request_id, key, start, start + external, tuple(known.blocks)
            )

    def step(self, output: Any) -> tuple[tuple[Load, ...], tuple[Save, ...], tuple[int, ...]]:
        """What the workers have to do in a step that the scheduler has just planned, and the blocks that were given out
        for it: what was in them counts no more."""
        scheduled = output.num_scheduled_tokens
        loads = tuple(load for name, load in self._loads.items() if name in scheduled)
        self._loads.clear()
        for new in output.scheduled_new_reqs:
            self._extend(new.req_id, new.block_ids, whole=True)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._extend(name, blocks, whole=name in cached.resumed_req_ids)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        saves = tuple(filter(None, (self._save(name, computed[name] + scheduled[name]) for name in computed)))
        self._learn()
        return loads, saves, self._fresh(output, loads) if self.saves else ()

    def report(self, report: Report) -> None:
        """Take in what the workers did."""
        for saved in report.saved:
            self._lost.pop(saved.name, None)
            if saved.name in self._decided:
                _put(self._awaited, saved.name, saved, _MOST_PENDING)
        for name in report.lost:
            _put(self._lost, name, self._clock(), _MOST_LOST)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._loads.pop(request_id, None)

    def _known(self, request: Any) -> _Request | None:
        """What is kept of a request; None for one whose cache does not follow from its tokens alone."""
        others = (request.lora_request, request.prompt_embeds)
        if request.prompt_token_ids is None or request.mm_features or any(one is not None for one in others):
            return None
        if request.request_id not in self._requests:
            salt = request.cache_salt or ""
            identity = f"{self.layout.fingerprint.hex()}\0{self.settings.namespace}\0{salt}"
            keys = prompt_keys(request.prompt_token_ids, identity)
            self._requests[request.request_id] = _Request(keys, salt)
        return self._requests[request.request_id]

    def _extend(self, name: str, groups: Sequence[Sequence[int]] | None, *, whole: bool) -> None:
        known = self._requests.get(name)
        if known is not None and groups is not None:
            known.blocks = list(groups[0]) if whole else [*known.blocks, *groups[0]]

    def _fresh(self, output: Any, loads: Sequence[Load]) -> tuple[int, ...]:
        """Blocks that hold nothing yet: those behind what a request finds in the engine's own cache."""
        starts, cached = {load.request: load.start for load in loads}, output.scheduled_cached_reqs
        found: list[int] = []
        whole = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for name, groups, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if groups is not None and name in cached.resumed_req_ids:
                whole.append((name, groups, computed))
            elif groups is not None:
                found += groups[0]
        for name, groups, computed in whole:
            found += groups[0][starts.get(name, computed) // self.block_size :]
        return tuple(found)

    def _save(self, name: str, computed: int) -> Save | None:
        """The save of a request of which ``computed`` tokens are there after this step, if it is time for it."""
        known = self._requests.get(name)
        if not self.saves or known is None or known.saved or not known.keys:
            return None
        key = known.keys[0]
        if computed < key.tokens:
            return None
        known.saved = True
        if key.tokens < self.settings.min_tokens or self._find([key.name]) is not None:
            return None
        return Save(name, key, tuple(known.blocks), self._decide(key))

    def _decide(self, key: PromptKey) -> str:
        if self.controller is None:
            return ""
        given = self.settings
        bandwidth = self.goodput.bandwidth if given.bandwidth is None else given.bandwidth
        raw_bytes = self.layout.raw_bytes(key.tokens)
        context = ServiceContext(given.workload, raw_bytes, bandwidth, given.slo, given.min_quality)
        decision = self.controller.decide(context)
        _put(self._decided, key.name, decision, _MOST_PENDING)
        log.info("frame %s of %d tokens: %s", key.name[:8], key.tokens, decision.why.splitlines()[0])
        return decision.profile.name

    def _learn(self) -> None:
        """Tell the controller what requests took whose readers have answered."""
        now = self._clock()
        if not self._awaited or now - self._polled < _POLL:
            return
        self._polled = now
        try:
            found = self.store.receipts(self._awaited)
        except Exception as error:  # whatever a store does, requests are served
            log.warning("receipts cannot be read: %s", first_line(error))
            return
        for name, receipt in found.items():
            saved, decision = self._awaited.pop(name, None), self._decided.pop(name, None)
            if saved is None or decision is None or self.controller is None:
                continue
            moving = saved.write + receipt.fetch
            self.goodput.acknowledge(saved.sent_bytes, moving)
            bandwidth = saved.sent_bytes / moving if moving > 0 else None
            taken = saved.encode + moving + receipt.decode
            self.controller.observe(decision, taken, bandwidth=bandwidth)
            log.info("frame %s took %.3g s with %s", name[:8], taken, decision.profile.name)

    def _find(self, names: Sequence[str]) -> int | None:
        try:
            return self.store.find(names)
        except Exception as error:  # whatever a store does, requests are served
            log.warning("the store cannot be searched, prompts are computed here: %s", first_line(error))
            return None


def _put(kept: OrderedDict, name: str, value: Any, most: int) -> None:
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)
