"""``run_tasks``, ``run_tasks_of``: generated tasks answered through a compressed cache, of one method and of many."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from torch import Tensor

from diffkv_repro.cache import Method, Session, compress
from diffkv_repro.evaluation.decoding import KVUse, hold_back, left_padded
from diffkv_repro.evaluation.finished import Finished, identity_of
from diffkv_repro.evaluation.workers import shared
from diffkv_repro.models import LoadedModel
from diffkv_repro.workloads.tasks import Item


@dataclass(frozen=True)
class TaskResult:
    """One item: its continuation ``text``, and whether it is right. ``tokens`` of the prompt.

    ``nominal``, ``true``: bytes of its batch's cache over FP16 at the end; ``reads`` of the cache, over all layers.
    """

    correct: bool
    text: str
    tokens: int
    nominal: float
    true: float
    reads: int


@dataclass(frozen=True)
class _Job:
    """Requests of one batch, by their index too, that ``method`` has not answered yet; ``name`` is the caller's."""

    name: str
    method: Method
    batch: tuple[int, ...]
    requests: tuple[tuple[str, int], ...]
    storage: str
    min_decoded: int


def run_tasks(
    loaded: LoadedModel,
    items: Sequence[Item],
    method: Method,
    *,
    storage: str = "simulated",
    max_new_tokens: int | None = None,
    batch_size: int = 1,
    min_decoded: int = 1,
    finished: Path | None = None,
) -> list[TaskResult]:
    """Continue each item's prompt greedily through the cache of ``method``; results in the order of ``items``.

    ``max_new_tokens`` is each item's own where it is not given. The last ``min_decoded`` tokens of a prompt are decoded
    through the cache, so that the first token of the answer depends on it as well (0: as on a server). Results are
    kept in the SQLite file ``finished``, and those that are there are not computed again.
    """
    return run_tasks_of(
        loaded, items, {"": method}, storage=storage, max_new_tokens=max_new_tokens, batch_size=batch_size,
        min_decoded=min_decoded, finished=finished, workers=1,
    )[""]  # fmt: skip


def run_tasks_of(
    loaded: LoadedModel,
    items: Sequence[Item],
    methods: Mapping[str, Method],
    *,
    storage: str = "simulated",
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    min_decoded: int = 1,
    finished: Path | None = None,
    workers: int | None = None,
) -> dict[str, list[TaskResult]]:
    """:func:`run_tasks` of many ``methods``, by the names they have here.

    ``batch_size`` is 8 on a CPU and 64 on CUDA where it is not given. ``workers`` processes share the batches of all
    methods, as in :func:`~diffkv_repro.evaluation.workers.shared`; ``finished`` is written by this process alone.
    """
    if batch_size is None:
        batch_size = 8 if loaded.device.type == "cpu" else 64
    if batch_size < 1 or min_decoded < 0:
        raise ValueError(f"batch_size is {batch_size}, min_decoded {min_decoded}; allowed from 1 and from 0")
    requests = [(item.prompt, max_new_tokens or item.max_new_tokens) for item in items]
    answers, jobs = {}, []
    with ExitStack() as files:
        known = {}
        for name, method in methods.items():
            identity = identity_of(loaded, method, storage) | {"min_decoded": min_decoded}
            known[name] = files.enter_context(closing(Finished(finished, identity)))
            answers[name] = own = [known[name].get(request) for request in requests]
            rest = [index for index, answer in enumerate(own) if answer is None]
            for batch in _batches(rest, requests, batch_size):
                asked = tuple(requests[index] for index in batch)
                jobs.append(_Job(name, method, tuple(batch), asked, storage, min_decoded))
        tokens = sum(len(loaded.tokenizer(prompt)["input_ids"]) + new for job in jobs for prompt, new in job.requests)
        work = shared(loaded, _answer, jobs, tokens=tokens, workers=workers)
        for job, found in track(work, "batches answered", total=len(jobs), disable=len(methods) < 2 or not jobs):
            known[job.name].put(zip(job.requests, found, strict=True))
            for index, answer in zip(job.batch, found, strict=True):
                answers[job.name][index] = answer
    return {
        name: [_result(item, answer) for item, answer in zip(items, own, strict=True)] for name, own in answers.items()
    }


def _answer(loaded: LoadedModel, job: _Job) -> list[dict[str, Any]]:
    """What is kept of each request of a batch."""
    with compress(loaded.model, job.method, storage=job.storage) as session:
        texts, tokens, use = _generate(session, loaded, job.requests, job.min_decoded)
    return [
        {"text": text, "tokens": length, "kv": asdict(use)} for text, length in zip(texts, tokens, strict=True)
    ]  # fmt: skip


def _batches(rest: Sequence[int], requests: Sequence[Any], size: int) -> Iterator[list[int]]:
    """Requests of like length and as many new tokens, so that little of a batch is padding."""
    order = sorted(rest, key=lambda index: (requests[index][1], len(requests[index][0])))
    while order:
        new = requests[order[0]][1]
        batch = [index for index in order[:size] if requests[index][1] == new]
        del order[: len(batch)]
        yield batch


def _generate(
    session: Session, loaded: LoadedModel, requests: Sequence[Any], min_decoded: int
) -> tuple[list[str], list[int], KVUse]:
    """Continuations of the prompts, how many tokens those have, and the use of their cache."""
    rows = [loaded.tokenizer(prompt)["input_ids"] for prompt, _ in requests]
    ends = _ends(loaded)
    pad = ends[0] if ends else 0
    ids, mask = left_padded(rows, pad, loaded.device)
    cache = hold_back(session, loaded.model, ids, mask, min_decoded)
    output = loaded.model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache.hf, max_new_tokens=requests[0][1],
        do_sample=False, num_beams=1, pad_token_id=pad,
    )  # fmt: skip
    return _texts(loaded, output[:, ids.shape[1] :], ends), [len(row) for row in rows], KVUse.of(cache)


def _ends(loaded: LoadedModel) -> list[int]:
    """Tokens that end a text."""
    end = loaded.model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _texts(loaded: LoadedModel, output: Tensor, ends: Sequence[int]) -> list[str]:
    """Continuations up to their end, which is what the padding after it depends on in a batch."""
    texts = []
    for row in output.tolist():
        stop = next((index for index, token in enumerate(row) if token in ends), len(row))
        texts.append(loaded.tokenizer.decode(row[:stop], skip_special_tokens=True))
    return texts


def _result(item: Item, answer: dict[str, Any]) -> TaskResult:
    kv = KVUse(**answer["kv"])
    return TaskResult(
        item.correct(answer["text"]), answer["text"], answer["tokens"], kv.nominal, kv.true, kv.reads
    )  # fmt: skip
