"""Where profiles are evaluated: in this process, in local processes, or on a Ray cluster."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.processes import die_with
from diffkv_repro.kvserve.history import Evaluation
from diffkv_repro.kvserve.profile import Profile

TASKS = ("evaluate", "ratio")
ATTEMPTS = 2
Answer = dict[str, Any]


class Evaluator(Protocol):
    """Measures profiles on one model and workload."""

    def evaluate(self, profile: Profile) -> Evaluation:
        """Its quality, relative to the uncompressed cache."""

    def ratio(self, profile: Profile) -> float:
        """Its compression ratio: cheap, for every candidate is asked for it."""


# Called in each worker, so it must be of a module, or a functools.partial of such.
Make = Callable[[], Evaluator]


def answer(evaluator: Evaluator, task: str, profile: Profile) -> Answer:
    """What the evaluator says as plain data; whatever it raises becomes ``{"failure": reason}``."""
    try:
        found = getattr(evaluator, task)(profile)
        return {"ratio": float(found)} if task == "ratio" else found.as_dict()
    except Exception as error:  # a profile may break anything below; the search goes on without it
        return {"failure": f"{type(error).__name__}: {first_line(error)}"}


class Executor(ABC):
    """``slots`` profiles are evaluated at once. A context manager: leaving it ends the workers."""

    slots: int = 1

    @abstractmethod
    def run(self, task: str, profiles: Sequence[Profile]) -> Iterator[tuple[int, Answer]]:
        """Place in ``profiles`` and answer of each, in the order in which they end.

        A worker that dies is replaced and its profile tried once more; then it counts as failed.
        """

    def close(self) -> None:  # noqa: B027 (there may be none)
        """End all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Serial(Executor):
    """In this process, one after another."""

    def __init__(self, make: Make) -> None:
        self._make, self._evaluator = make, None

    def run(self, task: str, profiles: Sequence[Profile]) -> Iterator[tuple[int, Answer]]:
        """As :meth:`Executor.run`."""
        if self._evaluator is None:
            self._evaluator = self._make()
        for place, profile in enumerate(profiles):
            yield place, answer(self._evaluator, task, profile)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: connection.Connection
    place: int | None = None


class Processes(Executor):
    """``workers`` processes of this machine with one thread and an evaluator each; only JSON goes to and fro."""

    def __init__(self, make: Make, workers: int | None = None) -> None:
        self._make = make
        self.slots = workers or len(os.sched_getaffinity(0))
        self._workers: list[_Worker] = []

    def run(self, task: str, profiles: Sequence[Profile]) -> Iterator[tuple[int, Answer]]:
        """As :meth:`Executor.run`."""
        waiting, attempts = deque(range(len(profiles))), [0] * len(profiles)
        while len(self._workers) < min(self.slots, len(profiles)):
            self._workers.append(self._start())
        left = len(profiles)
        while left:
            for worker in self._workers:
                if worker.place is None and waiting:
                    self._send(worker, task, waiting.popleft(), profiles)
            for place, found in self._wait():
                attempts[place] += 1
                if found is None and attempts[place] < ATTEMPTS:
                    waiting.appendleft(place)
                    continue
                left -= 1
                yield place, found or {"failure": f"its worker died {attempts[place]} times"}

    def close(self) -> None:
        """End all workers; what they are at is lost."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _start(self) -> _Worker:
        # Spawned, not forked: a fork of a process with running threads can hang in any lock that one of them held.
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, self._make, os.getpid()), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def _send(self, worker: _Worker, task: str, place: int, profiles: Sequence[Profile]) -> None:
        worker.place = place
        with suppress(OSError):  # that it has died, the next wait sees
            worker.pipe.send_bytes(json.dumps({"task": task, "profile": profiles[place].as_dict()}).encode())

    def _wait(self) -> list[tuple[int, Answer | None]]:
        """Answers that have come, None from a worker that has died."""
        busy = {worker.pipe: worker for worker in self._workers if worker.place is not None}
        found: list[tuple[int, Answer | None]] = []
        for ready in connection.wait(list(busy)):
            worker = busy[ready]
            place, worker.place = worker.place, None
            try:
                found.append((place, json.loads(worker.pipe.recv_bytes())))
            except (EOFError, OSError):
                worker.process.join()
                worker.pipe.close()
                self._workers[self._workers.index(worker)] = self._start()
                found.append((place, None))
        return found


def _serve(pipe: connection.Connection, make: Make, parent: int) -> None:
    """A worker: one evaluator, made at the first question, and answers until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    die_with(parent)
    evaluator = None
    while True:
        try:
            asked = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            evaluator = evaluator or make()
        except Exception as error:
            found: Answer = {"failure": f"no evaluator: {type(error).__name__}: {first_line(error)}"}
        else:
            found = answer(evaluator, asked["task"], Profile.from_dict(asked["profile"]))
        pipe.send_bytes(json.dumps(found).encode())


_PROCESSES, _RAY = re.compile(r"processes(?::([1-9]\d*))?"), re.compile(r"ray(?::([1-9]\d*))?|ray://[^\s/]+")


def require_executor(spec: str) -> None:
    """Raise ValueError for what :func:`executor` does not know."""
    if spec != "serial" and not _PROCESSES.fullmatch(spec) and not _RAY.fullmatch(spec):
        raise ValueError(
            f"executor is {spec!r}; allowed are serial, processes, processes:<n>, ray, ray:<n>, ray://host:port"
        )


def executor(spec: str, make: Make) -> Executor:
    """``serial``, ``processes`` or ``processes:4``, ``ray`` for a cluster of this machine, ``ray://host:port`` for one
    that runs. Raises ValueError for anything else, and where Ray is asked for and not installed."""
    require_executor(spec)
    if spec == "serial":
        return Serial(make)
    if found := _PROCESSES.fullmatch(spec):
        return Processes(make, int(found[1]) if found[1] else None)
    from diffkv_repro.kvserve.ray_executor import RayExecutor

    workers = _RAY.fullmatch(spec)[1]
    return RayExecutor(make, address=spec if "//" in spec else None, workers=int(workers) if workers else None)


def failure_of(found: Mapping[str, Any]) -> str | None:
    """The reason of an answer that is a failure."""
    return found.get("failure")
