"""``AsyncLLM``: an engine that answers while others ask."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from diffkv_repro.engine.llm import LLM, Prompt
from diffkv_repro.engine.request import RequestOutput, SamplingParams

log = logging.getLogger(__name__)


class AsyncLLM:
    """An :class:`LLM` whose steps run in a thread of their own as long as there is work.

    Use it as ``async with AsyncLLM(llm) as engine: async for output in engine.generate(prompt): ...``. Leaving an
    answer early cancels its request. The thread alone touches the engine; others put what they want into its inbox.
    Whoever still waits when the engine closes, or asks one that is not open, gets a RuntimeError.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._answers: dict[int, asyncio.Queue] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is put into the inbox once the thread has left it
        self._open = False

    async def __aenter__(self) -> "AsyncLLM":
        if self._open:
            raise RuntimeError("the engine is open already")
        self._loop, self._inbox = asyncio.get_running_loop(), queue.SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The answer as it grows. What the engine raises, for this request or in a step, is raised here."""
        answer: asyncio.Queue = asyncio.Queue()
        with self._lock:
            if not self._open:
                raise RuntimeError("the engine is not open; use it as `async with AsyncLLM(llm) as engine`")
            self._inbox.put(lambda: self._enter(prompt, params, answer))
        try:
            while True:
                output = await answer.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason:
                    return
        finally:
            self._inbox.put(lambda: self._leave(answer))

    def _run(self) -> None:
        reason: Exception = RuntimeError("the engine was closed before the answer was complete")
        try:
            while not self._closed():
                self._step()
        except Exception as error:  # nothing can be done here any more, and nobody should wait for it
            reason = error
        with self._lock:
            self._open = False
        for last in (self._closed, lambda: self._fail(reason)):  # who asked in the meantime, and all who wait
            try:
                last()
            except Exception:
                log.exception("the engine could not give back what its last requests held")

    def _closed(self) -> bool:
        """Do what is asked for; whether that is to close."""
        wishes = self._wishes() if self._open else self._left()
        for wish in wishes:
            if wish is not None:
                wish()
        return None in wishes

    def _wishes(self) -> list[Callable[[], None] | None]:
        """What is in the inbox; waits for something while there is nothing to do."""
        found = [self._inbox.get()] if self._llm.scheduler.idle else []
        return found + self._left()

    def _left(self) -> list[Callable[[], None] | None]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception as error:  # whoever waits should know, and the next request find the engine empty
            self._fail(error)
            return
        for output in outputs:
            if output.number in self._answers:
                self._tell(self._answers[output.number], output)

    def _fail(self, error: Exception) -> None:
        """Tell everybody, and take their requests out."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            self._tell(answer, error)
        self._llm.cancel(*answers)

    def _enter(self, prompt: Prompt, params: SamplingParams | None, answer: asyncio.Queue) -> None:
        try:
            self._answers[self._llm.add(prompt, params)] = answer
        except Exception as error:  # a tokenizer may raise anything
            self._tell(answer, error)

    def _leave(self, answer: asyncio.Queue) -> None:
        for number in [number for number, own in self._answers.items() if own is answer]:
            del self._answers[number]
            self._llm.cancel(number)

    def _tell(self, answer: asyncio.Queue, output: RequestOutput | Exception) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it who waited
            self._loop.call_soon_threadsafe(answer.put_nowait, output)
