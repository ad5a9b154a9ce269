"""Many methods on many texts: in batches, on all cores, each result kept on disk as soon as it is there."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
from rich.progress import track

from diffkv_repro.cache import FullPrecision, Method
from diffkv_repro.core.files import write_text
from diffkv_repro.core.provenance import package_versions
from diffkv_repro.core.timing import give_back_freed
from diffkv_repro.evaluation.digest import code_digest
from diffkv_repro.evaluation.intervals import Interval, mean_interval
from diffkv_repro.evaluation.teacher_forced import Scored, prefill, score
from diffkv_repro.evaluation.workers import shared, usual_workers
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.tasks import Item
from diffkv_repro.workloads.windows import Window

_MOST_ON_CPU, _MOST_ON_CUDA = 6, 48  # texts in a batch


@dataclass(frozen=True)
class _Job:
    """One batch of texts and the methods that have no result for it yet."""

    input_ids: torch.Tensor
    labels: tuple[str, ...]
    methods: tuple[Method, ...]
    paths: tuple[Path, ...]
    prompt_tokens: int
    storage: str


def compare(
    loaded: LoadedModel,
    windows: Mapping[str, Sequence[Window]],
    methods: Sequence[Method],
    folder: Path,
    *,
    prompt_tokens: int,
    storage: str = "simulated",
    batch: int | None = None,
    workers: int | None = None,
) -> pd.DataFrame:
    """Score every method on every window: a row each, with columns of :class:`Scored`, ``text``, ``window``, ``method``
    and ``added_nll`` (over FP16 on the same window, which is always among the methods). ``windows`` by kind of text.

    ``batch`` texts go together. By default up to 48 on CUDA, where a step costs its launches whatever its size; on a
    CPU up to 6, so many that all workers have as many batches to score. What is in ``folder`` already is not computed
    again. ``workers`` processes share the batches, as in :func:`~diffkv_repro.evaluation.workers.shared`.
    """
    wanted = [FullPrecision(), *(method for method in methods if not isinstance(method, FullPrecision))]
    labels = [method.label for method in wanted]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two methods have the same label: {', '.join(sorted(labels))}")
    if batch is None:
        counts = [len(found) for found in windows.values()]
        whole = len(wanted) * sum(own.input_ids.numel() for found in windows.values() for own in found)
        cpu = loaded.device.type == "cpu"
        batch = fair_batch(counts, workers or usual_workers(loaded, whole), _MOST_ON_CPU) if cpu else _MOST_ON_CUDA
    groups = [(kind, own) for kind, found in windows.items() for own in _split(found, batch)]
    paths = {
        (index, method.label): Path(folder) / f"{_key(loaded, group, method, prompt_tokens, storage)}.json"
        for index, (_, group) in enumerate(groups)
        for method in wanted
    }
    jobs = []
    for index, (_, group) in enumerate(groups):
        missing = [method for method in wanted if _read(paths[index, method.label]) is None]
        if missing:
            ids = torch.cat([window.input_ids for window in group])
            names = tuple(window.label for window in group)
            targets = tuple(paths[index, method.label] for method in missing)
            jobs.append(_Job(ids, names, tuple(missing), targets, prompt_tokens, storage))
    tokens = sum(job.input_ids.numel() * len(job.methods) for job in jobs)
    work = shared(loaded, _run, jobs, tokens=tokens, workers=workers)
    for _ in track(work, description="texts", total=len(jobs), disable=not jobs):
        pass
    rows = [
        {"text": kind, "window": window.label, "method": method.label, **item}
        for index, (kind, group) in enumerate(groups)
        for method in wanted
        for window, item in zip(group, _read(paths[index, method.label]), strict=True)
    ]
    table = pd.DataFrame(rows)
    full = table[table["method"] == FullPrecision().label].set_index(["text", "window"])["nll"]
    table["added_nll"] = table["nll"] - full.loc[pd.MultiIndex.from_frame(table[["text", "window"]])].to_numpy()
    return table


def fair_batch(counts: Sequence[int], workers: int, most: int) -> int:
    """The largest batch of at most ``most`` with which ``workers`` get equally many batches, where ``counts`` texts of
    several kinds are to be scored, which do not mix; ``most`` if there is none."""
    for size in range(most, 0, -1):
        if sum(-(-count // size) for count in counts) % workers == 0:
            return size
    return most


def _split(found: Sequence[Window], most: int) -> list[list[Window]]:
    """As few batches of at most ``most`` as there can be, of nearly the same size."""
    pieces = -(-len(found) // most)
    edges = [-(-len(found) * index // pieces) for index in range(pieces + 1)] if pieces else []
    return [list(found[start:stop]) for start, stop in pairwise(edges)]


def summarise(table: pd.DataFrame, column: str, *, seed: int = 0) -> dict[str, Interval]:
    """Mean of ``column`` by method with its interval over texts, in the order of the table."""
    return {
        method: mean_interval(own[column].to_numpy(), seed=seed) for method, own in table.groupby("method", sort=False)
    }


def difference(table: pd.DataFrame, column: str, first: str, second: str, *, seed: int = 0) -> Interval:
    """Mean over texts of ``first`` minus ``second``, paired by text."""
    wide = table.pivot(index=["text", "window"], columns="method", values=column)
    return mean_interval((wide[first] - wide[second]).to_numpy(), seed=seed)


def fit_on_items(loaded: LoadedModel, method: Method, items: Sequence[Item], share: float) -> Method:
    """A budget of :mod:`diffkv_repro.baselines.budgets` that prunes ``share`` of the tokens of ``items``."""
    prompts = []
    for item in items:
        ids = loaded.tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        prompts += prefill(loaded.model, ids, ids.shape[1] - 2).prompts
    return method.fitted(prompts, share)


def _run(loaded: LoadedModel, job: _Job) -> None:
    """Score one batch; each method's results are written as they are there."""
    results = score(loaded.model, job.input_ids, job.methods, prompt_tokens=job.prompt_tokens, storage=job.storage)
    for path, method, scored in zip(job.paths, job.methods, results, strict=True):
        document = {"method": repr(method), "windows": job.labels, "scored": [asdict(item) for item in scored]}
        write_text(path, json.dumps(document) + "\n")
        give_back_freed()  # else a worker grows to several times what it needs


def _read(path: Path) -> list[dict] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["scored"]
        return [asdict(Scored(**item)) for item in found]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(loaded: LoadedModel, group: Sequence[Window], method: Method, prompt_tokens: int, storage: str) -> str:
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    what = [
        loaded.fingerprint, str(loaded.model.dtype), loaded.device.type, repr(method), prompt_tokens, storage, versions,
        code_digest("evaluation/teacher_forced"),
    ]  # fmt: skip
    tokens = torch.cat([window.input_ids for window in group])
    what.append(list(tokens.shape))
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode() + tokens.numpy().tobytes()).hexdigest()[:24]
