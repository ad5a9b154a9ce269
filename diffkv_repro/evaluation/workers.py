"""``shared``: jobs on one model, in processes of one thread each where there is enough to do."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from diffkv_repro.core.processes import die_with
from diffkv_repro.core.timing import give_back_freed
from diffkv_repro.models import load_model
from diffkv_repro.models.zoo import LoadedModel

_WORTH_WORKERS = 20_000  # tokens times methods; a worker takes some ten seconds to start
_ON_CUDA = 4  # processes on one device


def shared(
    loaded: LoadedModel,
    function: Callable[[LoadedModel, Any], Any],
    jobs: Sequence[Any],
    *,
    tokens: int,
    workers: int | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Each of ``jobs`` with what ``function`` of the model and the job returns, in the order in which they end.

    ``function`` is one of a module, jobs and results can be pickled, and ``tokens`` is how many go through the model in
    all jobs together. ``workers`` processes of one thread each share the jobs, every one with a model of its own: by
    default all cores on a CPU, where threads that share the small matrices of a decoding step get in each other's way,
    and four on CUDA, where one process cannot launch kernels as fast as the device ends them. Where there is too little
    to do, or the model is not on disk, all is done in this process. An error ends the jobs that have not begun.
    """
    count = min(workers or usual_workers(loaded, tokens), len(jobs))
    if count <= 1 or _too_little(loaded, tokens):
        for job in jobs:
            yield job, function(loaded, job)
        return
    # Spawned, not forked: a fork of a process with running threads can hang in any lock that one of them held.
    arguments = (loaded.source, str(loaded.model.dtype).removeprefix("torch."), str(loaded.device), os.getpid())
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker, arguments)
    try:
        started = {pool.submit(_run_in_worker, function, job): job for job in jobs}
        for finished in as_completed(started):
            yield started[finished], finished.result()
    finally:
        pool.shutdown(cancel_futures=True)


def usual_workers(loaded: LoadedModel, tokens: int) -> int:
    """How many processes :func:`shared` takes where nobody says: the cores of a CPU, four on CUDA; one, where there is
    too little to do."""
    if _too_little(loaded, tokens):
        return 1
    return len(os.sched_getaffinity(0)) if loaded.device.type == "cpu" else _ON_CUDA


def _too_little(loaded: LoadedModel, tokens: int) -> bool:
    return loaded.source is None or tokens < _WORTH_WORKERS


def _start_worker(source: str, dtype: str, device: str, parent: int) -> None:
    torch.set_num_threads(1)
    die_with(parent)  # a worker whose notebook was killed would otherwise wait for its next job for ever
    _worker["loaded"] = load_model(source, device=device, dtype=getattr(torch, dtype))


_worker: dict[str, LoadedModel] = {}


def _run_in_worker(function: Callable[[LoadedModel, Any], Any], job: Any) -> Any:
    result = function(_worker["loaded"], job)
    give_back_freed()  # else a worker grows to several times what it needs
    return result
