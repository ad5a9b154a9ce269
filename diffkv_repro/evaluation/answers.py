"""``Answers``: what a run of lm-eval has finished, and what its caches held, task by task."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffkv_repro.evaluation.decoding import KVUse
from diffkv_repro.evaluation.finished import Finished
from diffkv_repro.evaluation.teacher_forced import NotReadError


class Answers:
    """Answers by request, in memory and in a file of finished ones; ``identity`` as in :class:`Finished`.

    A request is what lm-eval calls one: its kind (``loglikelihood``, ``loglikelihood_rolling``, ``generate_until``) and
    its arguments. Sampled generations are not kept: repeats of them are to differ.
    """

    def __init__(self, identity: Mapping[str, Any], path: str | Path | None = None) -> None:
        self._identity = identity
        self._finished = Finished(None if path is None else Path(path), identity)
        self._done: dict[str, tuple[Any, KVUse | None]] = {}
        self._uses: dict[str, list[KVUse]] = defaultdict(list)
        self.resumed = 0

    def keep(self, path: str | Path) -> None:
        """Keep finished answers in the file ``path`` from now on, and take those that are there."""
        self._finished.close()
        self._finished = Finished(Path(path), self._identity)

    def collect(self, kind: str, requests: Sequence[Any], run: Callable[[list], None]) -> list[Any]:
        """Answers to ``requests``, after ``run`` has finished those that were not yet.

        Raises NotReadError where it finished them without reading a cache.
        """
        self._done.clear()
        rest = [request for request in requests if not self._known(kind, request.args)]
        self.resumed += len(requests) - len(rest)
        if rest:
            run(rest)
            uses = [self._done[_key(kind, request.args)][1] for request in rest]
            if not any(use.reads for use in uses if use is not None):
                raise NotReadError(f"none of {len(rest)} {kind} requests read the compressed cache: they tell nothing")
        found = [(request.task_name or "requests", *self._done[_key(kind, request.args)]) for request in requests]
        for task, _, use in found:
            if use is not None:
                self._uses[task].append(use)
        return [answer for _, answer, _ in found]

    def finish(self, kind: str, answers: Iterable[tuple[Sequence[Any], Any]], use: KVUse | None) -> None:
        """Take note of the (arguments, answer) pairs of one batch, whose cache held ``use``."""
        answers = list(answers)
        self._done.update({_key(kind, arguments): (answer, use) for arguments, answer in answers})
        kv = None if use is None else asdict(use)
        self._finished.put(
            ([kind, *arguments], {"answer": answer, "kv": kv})
            for arguments, answer in answers
            if not _sampled(kind, arguments)
        )

    def summaries(self) -> dict[str, dict[str, Any]]:
        """For each task so far: requests, mean ratios and tokens, and reads of their caches."""
        return {task: KVUse.summary(uses) for task, uses in self._uses.items()}

    def _known(self, kind: str, arguments: Sequence[Any]) -> bool:
        found = None if _sampled(kind, arguments) else self._finished.get([kind, *arguments])
        if found is not None:
            use = None if found["kv"] is None else KVUse(**found["kv"])
            self._done[_key(kind, arguments)] = (found["answer"], use)
        return found is not None


def _key(kind: str, arguments: Iterable[Any]) -> str:
    return json.dumps([kind, *arguments], sort_keys=True)


def _sampled(kind: str, arguments: Sequence[Any]) -> bool:
    if kind != "generate_until":
        return False
    options = arguments[1]
    if options.get("do_sample") is False:
        return False  # whatever the temperature beside it: LongBench's tasks give 1
    return bool(options.get("do_sample")) or float(options.get("temperature") or 0) > 0
