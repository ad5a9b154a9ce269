"""Evaluation on a Ray cluster: an actor a slot, with a GPU each where the cluster has any."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from diffkv_repro.kvserve.executor import ATTEMPTS, Answer, Executor, Make, answer
from diffkv_repro.kvserve.profile import Profile


class RayExecutor(Executor):
    """``workers`` actors (a GPU each, or a core each where there is none) at ``address``, or on this machine.

    Raises ValueError where Ray is not installed.
    """

    def __init__(self, make: Make, *, address: str | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError("executor ray needs the package ray: pip install 'diffkv-repro[ray]'") from None
        self._ray, self._make = ray, make
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False,
                **({} if address else {"num_cpus": workers}),
            )
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0))
        self.slots = workers or gpus or max(1, int(there.get("CPU", 1)))
        self._actor = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_restarts=0)(_Actor)
        self._idle: list[Any] = []

    def run(self, task: str, profiles: Sequence[Profile]) -> Iterator[tuple[int, Answer]]:
        """As :meth:`Executor.run`."""
        ray, waiting, attempts = self._ray, deque(range(len(profiles))), [0] * len(profiles)
        running: dict[Any, tuple[int, Any]] = {}
        while waiting or running:
            while waiting and len(running) < self.slots:
                place = waiting.popleft()
                actor = self._idle.pop() if self._idle else self._actor.remote(self._make)
                running[actor.answer.remote(task, json.dumps(profiles[place].as_dict()))] = (place, actor)
            (done,), _ = ray.wait(list(running), num_returns=1)
            place, actor = running.pop(done)
            attempts[place] += 1
            try:
                found = json.loads(ray.get(done))
            except ray.exceptions.RayError as error:  # the actor, its node or the way to it is gone
                if attempts[place] < ATTEMPTS:
                    waiting.appendleft(place)
                    continue
                found = {"failure": f"its worker died {attempts[place]} times: {type(error).__name__}"}
            else:
                self._idle.append(actor)
            yield place, found

    def close(self) -> None:
        """End all actors, and the cluster if it was started here."""
        for actor in self._idle:
            self._ray.kill(actor)
        self._idle = []
        if self._started:
            self._ray.shutdown()


class _Actor:
    """One evaluator, made at the first question."""

    def __init__(self, make: Make) -> None:
        self._make, self._evaluator = make, None

    def answer(self, task: str, profile: str) -> str:
        self._evaluator = self._evaluator or self._make()
        return json.dumps(answer(self._evaluator, task, Profile.from_dict(json.loads(profile))))
