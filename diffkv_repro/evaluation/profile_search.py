"""A workload's profiles searched, timed and put into a library: what ``diffkv-repro search`` does."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffkv_repro.core.files import write_text
from diffkv_repro.core.finished import Finished
from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture, device_name
from diffkv_repro.core.threads import one_thread
from diffkv_repro.evaluation.profiling import Workload, make_evaluator
from diffkv_repro.kvserve.documents import scores_identity
from diffkv_repro.kvserve.driver import Watch, drive, measure_ratios, summary
from diffkv_repro.kvserve.encoding import Pool
from diffkv_repro.kvserve.executor import executor
from diffkv_repro.kvserve.history import AskTell
from diffkv_repro.kvserve.measure import measure_all
from diffkv_repro.kvserve.pareto import Entry, ProfileLibrary
from diffkv_repro.kvserve.prefill import prefill
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.search import Search, SearchSettings
from diffkv_repro.kvserve.space import Space

STORE, FOUND, LIBRARY = "evaluations.sqlite", "search.json", "library.json"
_TIMED = 3  # encodings and decodings of each profile, after one uncounted


@dataclass(frozen=True)
class SearchPlan:
    """What is searched and how; ``sample`` of the workload's documents judge each candidate, all where None."""

    space: Space
    settings: SearchSettings
    sample: int | None = None
    executor: str = "serial"
    batch: int | None = None


@dataclass(frozen=True)
class Found:
    """A finished search: the ``search`` itself, the profiles of its pool, and the library of its front."""

    search: AskTell
    profiles: list[Profile]
    library: ProfileLibrary


def search_workload(
    workload: Workload,
    plan: SearchPlan,
    folder: Path,
    *,
    resume: bool = False,
    watch_ratios: Callable[[int, int], None] | None = None,
    watch: Watch | None = None,
    latency: bool = True,
) -> Found:
    """Run ``plan``; every evaluation is in ``folder`` as it ends, and so are the search and the library at its end.

    A library that is there already is added to. Raises ValueError where ``folder`` holds evaluations and ``resume`` is
    not set, SearchError where nothing can be evaluated.
    """
    folder = Path(folder)
    if (folder / STORE).exists() and not resume:
        raise ValueError(
            f"{folder} holds an earlier search's evaluations: give --resume to use them, or another folder"
        )
    library = ProfileLibrary.load(folder / LIBRARY) if (folder / LIBRARY).exists() else ProfileLibrary()
    identity = scores_identity(workload.loaded, workload.documents, workload.assets) | {"sample": plan.sample}
    store = Finished(folder / STORE, identity | {"seed": plan.settings.seed})
    make = partial(make_evaluator, dict(workload.settings), plan.sample, plan.settings.seed)
    try:
        with executor(plan.executor, make) as workers:
            profiles, ratios = measure_ratios(list(plan.space), workers, store, watch=watch_ratios)
            search = Search(Pool.of(profiles, ratios), plan.settings)
            drive(search, profiles, workers, store, batch=plan.batch, watch=watch)
    finally:
        store.close()
    config = dict(workload.settings) | {
        "space": plan.space.name,
        "search": asdict(plan.settings),
        "sample": plan.sample,
    }
    provenance = capture(root=project_root(), seed=plan.settings.seed, config=config).as_dict()
    entries = _entries(workload, search, profiles, provenance) if latency else []
    library = library.merged(entries)
    document = {"provenance": provenance} | summary(search, profiles)
    write_text(folder / FOUND, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if entries:
        library.save(folder / LIBRARY)
    return Found(search, profiles, library)


def _entries(
    workload: Workload, search: AskTell, profiles: list[Profile], provenance: Mapping[str, Any]
) -> list[Entry]:
    """The feasible profiles, timed on the first document's cache, less those that another one beats."""
    kept = search.feasible
    if not kept:
        return []
    loaded, ids = workload.loaded, workload.documents.ids[0]
    prompt = prefill(loaded, ids[:, : -workload.documents.continuation], dtype=torch.float16)
    with one_thread():
        chosen = [profiles[index] for index in kept]
        runs = measure_all(chosen, prompt.kv, prompt.layout, assets=workload.assets, repeats=_TIMED)
    entries = [
        Entry(
            model=loaded.name, weights=loaded.fingerprint, workload=workload.name, device=device_name(),
            profile=run.profile, quality=search.quality(index), ratio=float(search.pool.ratios[index]),
            encode=run.encode, decode=run.decode, raw_bytes=run.raw_bytes, documents=search.documents(index),
            low=search.interval(index)[0], high=search.interval(index)[1], provenance=provenance,
        )
        for index, run in zip(kept, runs, strict=True)
    ]  # fmt: skip
    return list(ProfileLibrary(tuple(entries)).front().entries)
