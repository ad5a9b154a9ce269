"""A model and the documents to search a workload's profiles on, ready to score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.documents import DocumentJudge, Documents
from diffkv_repro.kvserve.heads import score_heads
from diffkv_repro.kvserve.history import Evaluation
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.subset import estimate, stratified
from diffkv_repro.models import LoadedModel, load_model
from diffkv_repro.workloads import TextError, load_windows, source_names


@dataclass(frozen=True, eq=False)
class Workload:
    """What a search needs; ``settings`` are the arguments of :func:`load_workload`, for another process to draw the
    same."""

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
    return Workload(source_names(sources), loaded, documents, assets, settings)


class LikelihoodEvaluator:
    """Quality of profiles as the perplexity of the uncompressed cache over theirs, on a workload's documents.

    ``sample`` of the documents are drawn in proportion to their sources; the interval is that of the full set. Ratios
    are those of the first ``ratio_documents`` of them: they keep their order from text to text.
    """

    def __init__(
        self, workload: Workload, *, sample: int | None = None, seed: int = 0, ratio_documents: int = 1
    ) -> None:
        sources = workload.documents.sources
        self.workload = workload
        self.chosen = stratified(sources, sample or len(sources), seed=seed)
        self._judges = [DocumentJudge(workload.loaded, workload.documents, index) for index in self.chosen]
        self._encoded = self._judges[:ratio_documents]

    def evaluate(self, profile: Profile) -> Evaluation:
        """Its quality with a 95 % interval."""
        with one_thread():
            scores = [judge.score(profile, self.workload.assets) for judge in self._judges]
        sources = self.workload.documents.sources
        lost = estimate([score.added_nll for score in scores], [sources[index] for index in self.chosen], sources)
        low, high = (math.exp(-end) if math.isfinite(end) else math.nan for end in (lost.high, lost.low))
        return Evaluation(math.exp(-lost.mean), low, high, lost.n)

    def ratio(self, profile: Profile) -> float:
        """Its compression ratio, everything counted."""
        with one_thread():
            return fmean(judge.ratio(profile, self.workload.assets) for judge in self._encoded)


def make_evaluator(settings: Mapping[str, Any], sample: int | None, seed: int) -> LikelihoodEvaluator:
    """The evaluator of :func:`load_workload` with ``settings``, for a worker of an executor."""
    return LikelihoodEvaluator(load_workload(**settings), sample=sample, seed=seed)
