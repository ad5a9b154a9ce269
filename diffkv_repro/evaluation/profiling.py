"""A model and the documents to search a workload's profiles on, ready to score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.documents import Documents
from diffkv_repro.kvserve.heads import score_heads
from diffkv_repro.models import LoadedModel, load_model
from diffkv_repro.workloads import TextError, load_windows, source_names


@dataclass(frozen=True, eq=False)
class Workload:
    """What a search needs; ``settings`` say how it was drawn, so that another process can draw the same."""

    name: str
    loaded: LoadedModel
    documents: Documents
    assets: Assets
    settings: Mapping[str, Any]


def load_workload(
    model: str,
    sources: Sequence[str],
    *,
    count: int,
    tokens: int,
    continuation: int,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """``count`` documents of ``tokens`` tokens from each of ``sources`` (bundled names, folders, ``hub:...``).

    Heads are ranked on a further text of each source where it has one, else on those that quality is measured on.
    Raises ValueError for models and sources that do not exist or hold too little text.
    """
    loaded = load_model(model, device=device)
    found = load_windows(sources, loaded.tokenizer, count=count, tokens=tokens, seed=seed)
    documents = Documents.of({name: [own.input_ids for own in many] for name, many in found.items()}, continuation)
    taken = {own.label for many in found.values() for own in many}
    try:
        more = load_windows(sources, loaded.tokenizer, count=count + 1, tokens=tokens, seed=seed)
    except TextError:
        more = found
    apart = [own for many in more.values() for own in many if own.label not in taken]
    ranked = [loaded.tokenizer.decode(own.input_ids[0]) for own in apart] or [
        loaded.tokenizer.decode(own[0]) for own in documents.ids
    ]
    settings = {
        "model": model, "sources": list(sources), "count": count, "tokens": tokens, "continuation": continuation,
        "seed": seed, "device": device,
    }  # fmt: skip
    assets = Assets(heads=score_heads(loaded, ranked))
    return Workload(source_names(sources), loaded, documents, assets, settings | {"heads_ranked_on": len(ranked)})
