"""Continuous batching: who enters, who goes on, and who has to wait when pages run out."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from diffkv_repro.engine.kv_cache import EngineCache
from diffkv_repro.engine.request import FinishReason, Request
from diffkv_repro.engine.shards import Shards


@dataclass(frozen=True)
class Batch:
    """Requests of the next step: ``prompts`` whose tokens all enter, or else a generation step of all that run."""

    requests: tuple[Request, ...]
    prompts: bool


class Scheduler:
    """First come, first served. Prompts go first, as many as fit in ``max_batch_tokens`` and find pages and slots.

    When a step might not find its pages, the latest arrival gives its own up and enters again later with all its tokens
    as its prompt, so nothing is lost. Every request leaves exactly once, by :meth:`finish`.
    """

    def __init__(
        self, cache: EngineCache, *, max_requests: int, max_batch_tokens: int, shards: Shards | None = None
    ) -> None:
        self.cache, self.max_batch_tokens = cache, max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._slots = list(range(max_requests - 1, -1, -1))
        self._shards = shards or Shards()

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run, with or without others."""
        needed = request.prompt_tokens + request.params.max_tokens
        if request.prompt_tokens < 1:
            raise ValueError("a prompt has no tokens; it needs at least one")
        if needed > self.cache.max_tokens:
            raise ValueError(
                f"{request.prompt_tokens} tokens of a prompt and max_tokens {request.params.max_tokens} make {needed}; "
                f"the engine was made for {self.cache.max_tokens}"
            )
        pages, pool = self.cache.most_pages(needed) + self.cache.memory.watermark, len(self.cache.memory.free)
        if pages > pool:
            raise ValueError(f"a request of {needed} tokens may take {pages} pages; the pool has {pool}")
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    def next_batch(self) -> Batch | None:
        """What to run now; None when idle."""
        entering = self._entering()
        if entering:
            return Batch(tuple(entering), prompts=True)
        while self.running and not self._shards.all_agree(self.cache.can_step()):
            self._preempt(max(self.running, key=lambda request: request.number))
        return Batch(tuple(self.running), prompts=False) if self.running else None

    def _entering(self) -> list[Request]:
        entering: list[Request] = []
        longest = 0
        while self.waiting and self._slots:
            request = self.waiting[0]
            # Prompts of a batch are padded to the longest.
            longest = max(longest, len(request.tokens))
            if entering and longest * (len(entering) + 1) > self.max_batch_tokens:
                break
            if not self._shards.all_agree(self.cache.can_admit(len(request.tokens), len(self.running))):
                break
            self.waiting.popleft()
            request.slot = self.take_slot()
            request.entered = len(request.tokens)
            self.running.append(request)  # from here on cancelling it gives back what it has
            self.cache.admit([request.slot], [request.entered])
            entering.append(request)
        return entering

    def take_slot(self) -> int:
        """A row of the page tables that no request has; ValueError when all are taken."""
        if not self._slots:
            raise ValueError("all request slots are taken")
        return self._slots.pop()

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.cache.release([request.slot])
        self._slots.append(request.slot)
        self.running.remove(request)
        request.slot = None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it is."""
        if request.slot is not None:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason

    def cancel(self, numbers: Iterable[int]) -> list[Request]:
        """Take out the requests of these numbers that are still here."""
        wanted = set(numbers)
        found = [request for request in (*self.waiting, *self.running) if request.number in wanted]
        for request in found:
            self.finish(request, "cancelled")
        return found
