"""``AsyncLLM``: an engine that answers while others ask."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from diffkv_repro.engine.llm import LLM, Prompt
from diffkv_repro.engine.request import RequestOutput, SamplingParams


class AsyncLLM:
    """An :class:`LLM` whose steps run in a thread of their own as long as there is work.

    Use it as ``async with AsyncLLM(llm) as engine: async for output in engine.generate(prompt): ...``. Leaving an
    answer early cancels its request. The thread alone touches the engine; others put what they want into its inbox.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._answers: dict[int, asyncio.Queue] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def __aenter__(self) -> "AsyncLLM":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The answer as it grows. What the engine raises, for this request or in a step, is raised here."""
        answer: asyncio.Queue = asyncio.Queue()
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
        while True:
            for wish in self._wishes():
                if wish is None:
                    return
                wish()
            self._step()

    def _wishes(self) -> list[Callable[[], None] | None]:
        """What is in the inbox; waits for something while there is nothing to do."""
        found = [self._inbox.get()] if self._llm.scheduler.idle else []
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception as error:  # whoever waits should know, and the next request find the engine empty
            answers = list(self._answers.values())
            self._llm.cancel(*self._answers)
            self._answers.clear()
            for answer in answers:
                self._tell(answer, error)
            return
        for output in outputs:
            if output.number in self._answers:
                self._tell(self._answers[output.number], output)

    def _enter(self, prompt: Prompt, params: SamplingParams | None, answer: asyncio.Queue) -> None:
        try:
            self._answers[self._llm.add(prompt, params)] = answer
        except ValueError as error:
            self._tell(answer, error)

    def _leave(self, answer: asyncio.Queue) -> None:
        for number in [number for number, own in self._answers.items() if own is answer]:
            del self._answers[number]
            self._llm.cancel(number)

    def _tell(self, answer: asyncio.Queue, output: RequestOutput | Exception) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it who waited
            self._loop.call_soon_threadsafe(answer.put_nowait, output)
