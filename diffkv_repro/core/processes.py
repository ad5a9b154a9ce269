"""Processes that do not outlive the one that started them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from typing import Any


def die_with(parent: int) -> None:
    """End this process soon after ``parent`` has ended, however that came about; watched by a thread of its own."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class ProcessFailed(RuntimeError):
    """A process that raised, crashed or took too long; the text says which."""


class Apart:
    """A function that yields, in a process of its own: native code that crashes there leaves this process alone.

    The process starts at once and imports what it needs; the function runs when :meth:`results` is asked for. The
    function is one of a module, and arguments and what it yields can be pickled.
    """

    def __init__(self, function: Callable[..., Iterable[Any]], *arguments: Any) -> None:
        # Spawned, not forked: CUDA does not survive a fork.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid(), function, arguments), daemon=True
        )  # fmt: skip
        self._process.start()
        theirs.close()

    def results(self, seconds: float) -> Iterator[Any]:
        """What the function yields, as it comes. Raises ProcessFailed, also where nothing comes for ``seconds``."""
        try:
            self._pipe.send("go")
            while True:
                if not self._pipe.poll(seconds):
                    raise ProcessFailed(f"nothing came for {seconds:g} seconds")
                kind, content = self._pipe.recv()
                if kind == "end":
                    return
                if kind == "error":
                    raise ProcessFailed(content)
                yield content
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(10)
            raise ProcessFailed(_ended(self._process.exitcode)) from None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)


def _serve(pipe: Any, parent: int, function: Callable[..., Iterable[Any]], arguments: tuple[Any, ...]) -> None:
    die_with(parent)
    try:
        pipe.recv()
    except EOFError:
        return
    try:
        for item in function(*arguments):
            pipe.send(("item", item))
        pipe.send(("end", None))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with status {code}"
