"""What profiles do to the quality of a model on several workloads (KVServe section 7, Figure 3 and Table 1).

All profiles are asked the same prompts, and each prompt's exact attention is computed once. Quality is relative to the
uncompressed FP32 run on the same items, resampled together with it.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache import CompressedCache, FullPrecision, Method, compress
from diffkv_repro.cache.layer import Rows
from diffkv_repro.core.threads import one_thread
from diffkv_repro.evaluation.decoding import left_padded
from diffkv_repro.evaluation.finished import Finished, identity_of
from diffkv_repro.evaluation.intervals import Interval, mean_interval, ratio_interval
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.evaluation.workers import shared
from diffkv_repro.models import LoadedModel
from diffkv_repro.models.hf import AttentionCall, decoder_of, intercept_attention
from diffkv_repro.workloads.tasks import PATTERNS, Item

log = logging.getLogger(__name__)

COLUMNS = ("workload", "profile", "item", "score", "plain", "ratio", "kl", "agreement", "tokens", "reads")
_CODE = "evaluation/profile_quality"


@dataclass(frozen=True)
class Workload:
    """Either ``items`` to be answered greedily, scored 1 or 0, or ``texts``, token ids [1, n] of equal length, whose
    last ``continuation`` tokens are scored by their log-likelihood, in nats a token."""

    name: str
    items: tuple[Item, ...] = ()
    texts: tuple[Tensor, ...] = ()
    continuation: int = 0

    def __post_init__(self) -> None:
        if bool(self.items) == bool(self.texts):
            raise ValueError(f"workload {self.name} has {len(self.items)} items and {len(self.texts)} texts; give one")
        lengths = {text.shape[1] for text in self.texts}
        if self.texts and (len(lengths) > 1 or not 1 <= self.continuation < min(lengths) - 1):
            raise ValueError(
                f"texts of workload {self.name} have {sorted(lengths)} tokens and a continuation of "
                f"{self.continuation}; they must agree, and leave a prompt"
            )


@dataclass(frozen=True)
class _Job:
    """Some items or texts of a workload for those ``methods`` that have not answered them."""

    workload: str
    first: int
    requests: tuple[Any, ...]
    continuation: int
    methods: Mapping[str, Method]


def judge_profiles(
    loaded: LoadedModel,
    workloads: Sequence[Workload],
    methods: Mapping[str, Method],
    *,
    batch_size: int = 8,
    finished: Path | None = None,
    workers: int | None = None,
) -> pd.DataFrame:
    """One row an item and method, with :data:`COLUMNS`.

    ``score`` of the item and ``plain``, the uncompressed run's; ``ratio`` of 16-bit KV to all bytes sent; ``kl`` nats
    and ``agreement`` (share of equal choices) against the uncompressed run, over the tokens before which both had said
    the same; ``tokens`` of the prompt; ``reads`` of the cache, never 0. Rows are kept in the SQLite file ``finished``.
    The last token of a prompt is decoded, so that the first of the answer has read what arrived.
    """
    if batch_size < 1 or not methods:
        raise ValueError(f"batch_size is {batch_size} and there are {len(methods)} methods; at least 1 of each")
    rows: list[dict[str, Any]] = []
    with ExitStack() as files:
        known = {
            name: files.enter_context(closing(Finished(finished, _identity(loaded, method))))
            for name, method in methods.items()
        }
        jobs, amount = [], 0
        for workload, first, requests in _batches(loaded, workloads, batch_size):
            request = [workload.name, first, [_plain(one) for one in requests], workload.continuation]
            done = {name: known[name].get(request) for name in methods}
            rows += [row | {"profile": name} for name, kept in done.items() for row in kept or ()]
            missing = {name: method for name, method in methods.items() if done[name] is None}
            if missing:
                jobs.append(_Job(workload.name, first, requests, workload.continuation, missing))
                amount += len(missing) * sum(_length(loaded, one) for one in requests)
        work = shared(loaded, _judge, jobs, tokens=amount, workers=workers)
        for job, found in track(work, "batches judged", total=len(jobs), disable=len(jobs) < 2):
            request = [job.workload, job.first, [_plain(one) for one in job.requests], job.continuation]
            for name, own in found.items():
                known[name].put([(request, own)])
                rows += [row | {"profile": name} for row in own]
    order = {workload.name: index for index, workload in enumerate(workloads)}
    names = {name: index for index, name in enumerate(methods)}
    rows.sort(key=lambda row: (order[row["workload"]], names[row["profile"]], row["item"]))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def summarise(judged: pd.DataFrame, workloads: Iterable[Workload], *, seed: int = 0) -> pd.DataFrame:
    """A row for each workload and profile: ``relative`` quality with its 95 % interval ``low``, ``high`` (bootstrap
    over items, the uncompressed run resampled with them), ``n``, and mean ``score``, ``plain``, ``ratio``, ``kl``,
    ``agreement``.

    Of tasks ``relative`` is the score over the uncompressed one; of texts the uncompressed perplexity over the
    profile's. A task that the uncompressed model never solves is left out, with a warning: nothing is relative to 0.
    """
    texts = {workload.name for workload in workloads if workload.texts}
    rows = []
    unsolved: set[str] = set()
    for (workload, profile), own in judged.groupby(["workload", "profile"], sort=False):
        if workload in texts:
            gain = mean_interval((own["score"] - own["plain"]).tolist(), seed=seed)
            found = Interval(*(math.exp(edge) for edge in (gain.mean, gain.low, gain.high)), gain.n)
        else:
            if not own["plain"].any():
                if workload not in unsolved:  # once, not for every profile
                    log.warning("%s is left out: the uncompressed model solves none of %d items", workload, len(own))
                unsolved.add(workload)
                continue
            found = ratio_interval(own["score"].tolist(), own["plain"].tolist(), seed=seed)
        means = {name: float(own[name].mean()) for name in ("score", "plain", "kl", "agreement")}
        ratio = len(own) / float((1 / own["ratio"]).sum())  # all bytes of 16-bit KV over all bytes sent
        place = {"workload": workload, "profile": profile, "ratio": ratio}
        rows.append(place | {"relative": found.mean, "low": found.low, "high": found.high, "n": found.n} | means)
    return pd.DataFrame(rows)


def _identity(loaded: LoadedModel, method: Method) -> dict[str, Any]:
    return identity_of(loaded, method, "wire", code=(_CODE,))


def _batches(loaded: LoadedModel, workloads: Sequence[Workload], size: int) -> Iterable[tuple[Workload, int, tuple]]:
    for workload in workloads:
        given = workload.items or workload.texts
        for first in range(0, len(given), size):
            yield workload, first, tuple(given[first : first + size])


def _plain(request: Any) -> Any:
    return request.tolist() if isinstance(request, Tensor) else [request.prompt, request.answer, request.max_new_tokens]


def _length(loaded: LoadedModel, request: Any) -> int:
    if isinstance(request, Tensor):
        return request.shape[1]
    return len(loaded.tokenizer(request.prompt)["input_ids"]) + 4 * request.max_new_tokens


@torch.inference_mode()
def _judge(loaded: LoadedModel, job: _Job) -> dict[str, list[dict[str, Any]]]:
    """The rows of every method of a job."""
    rows = [
        one[0].tolist() if isinstance(one, Tensor) else loaded.tokenizer(one.prompt)["input_ids"]
        for one in job.requests
    ]
    ids, mask = left_padded(rows, 0, loaded.device)
    first = ids.shape[1] - (job.continuation + 1 if job.continuation else 1)
    prompts, places = _prefill(loaded, ids[:, :first], mask[:, :first])
    found: dict[str, list[dict[str, Any]]] = {}
    run = _texts if job.continuation else _answers
    with one_thread():
        plain = run(loaded, job, _cache(loaded, FullPrecision(), prompts, places), ids, mask, first, None)
        for name, method in job.methods.items():
            cache = _cache(loaded, method, prompts, places)
            result = run(loaded, job, cache, ids, mask, first, plain)
            if not cache.reads:
                raise NotReadError(f"{method.label}: the cache that arrived was not read")
            ratio = 1 / cache.kv_bytes().true_ratio
            found[name] = [
                {
                    "workload": job.workload, "item": job.first + index, "score": score, "plain": before,
                    "ratio": ratio, "kl": kl, "agreement": same, "tokens": len(row), "reads": cache.reads,
                }
                for index, (row, score, before, (kl, same)) in enumerate(
                    zip(rows, result.scores, plain.scores, result.against(plain), strict=True)
                )
            ]  # fmt: skip
    return found


@dataclass(frozen=True)
class _Said:
    """``logprobs`` [batch, n, vocabulary] before each of ``tokens`` [batch, n]; ``scores`` of the batch's items."""

    logprobs: Tensor
    tokens: Tensor
    scores: list[float]

    def against(self, plain: "_Said") -> list[tuple[float, float]]:
        """KL divergence from the uncompressed run and agreement with it, where both had the same tokens before."""
        n = min(self.tokens.shape[1], plain.tokens.shape[1])
        mine, its = self.logprobs[:, :n], plain.logprobs[:, :n]
        same_before = (self.tokens[:, :n] == plain.tokens[:, :n]).long().cumprod(dim=1).roll(1, dims=1).bool()
        same_before[:, 0] = True
        kl = (its.exp() * (its - mine)).sum(dim=-1)
        same = mine.argmax(dim=-1) == its.argmax(dim=-1)
        return [
            (float(kl[row][there].mean()), float(same[row][there].float().mean()))
            for row, there in enumerate(same_before)
        ]


def _texts(
    loaded: LoadedModel, job: _Job, cache: CompressedCache, ids: Tensor, mask: Tensor, first: int, plain: _Said | None
) -> _Said:
    """Log-likelihood of the known continuations, decoded in one call: a later token never changes an earlier one."""
    del plain
    logits = _call(loaded, cache, ids[:, first:-1], mask[:, :-1], first)
    logprobs, said = logits.float().log_softmax(dim=-1), ids[:, first + 1 :]
    own = logprobs.gather(-1, said[..., None])[..., 0]
    return _Said(logprobs, said, own.double().mean(dim=1).tolist())


def _answers(
    loaded: LoadedModel, job: _Job, cache: CompressedCache, ids: Tensor, mask: Tensor, first: int, plain: _Said | None
) -> _Said:
    """Greedy answers; generation ends where no token to come can change which answer is found."""
    del plain
    items: Sequence[Item] = job.requests
    steps, tokens = [], []
    given, at = ids[:, first:], first
    for _ in range(max(item.max_new_tokens for item in items)):
        steps.append(_call(loaded, cache, given, mask, at)[:, -1].float().log_softmax(dim=-1))
        at += given.shape[1]
        given = steps[-1].argmax(dim=-1, keepdim=True)
        tokens.append(given)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        texts = loaded.tokenizer.batch_decode(torch.cat(tokens, dim=1))
        if all(_settled(item, text) for item, text in zip(items, texts, strict=True)):
            break
    said = torch.cat(tokens, dim=1)
    texts = [
        loaded.tokenizer.decode(row[: item.max_new_tokens], skip_special_tokens=True)
        for item, row in zip(items, said, strict=True)
    ]
    scores = [float(item.correct(text)) for item, text in zip(items, texts, strict=True)]
    return _Said(torch.stack(steps, dim=1), said, scores)


def _settled(item: Item, text: str) -> bool:
    """Whether the first answer in ``text`` is complete: something stands behind it."""
    found = re.search(PATTERNS[item.kind], text)
    if found is None or item.kind == "line":
        return "\n" in text.lstrip()
    return found.end() < len(text)


def _prefill(loaded: LoadedModel, ids: Tensor, mask: Tensor) -> tuple[list[PromptAttention], Rows]:
    """What every layer's exact attention saw of a batch padded on the left."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    padding = (mask == 0).sum(dim=1)
    given = padding if bool(padding.any()) else None
    layers: dict[int, PromptAttention] = {}

    def watch(call: AttentionCall) -> Tensor:
        prompt = layers[call.layer] = PromptAttention(call, given)
        return prompt.output()

    with intercept_attention(loaded.model, watch):
        decoder_of(loaded.model)(input_ids=ids, position_ids=positions, use_cache=False)
    return [layers[index] for index in sorted(layers)], Rows(given, positions)


def _cache(loaded: LoadedModel, method: Method, prompts: list[PromptAttention], rows: Rows) -> CompressedCache:
    with compress(loaded.model, method, storage="simulated") as session:
        cache = session.new_cache()
    cache.admit(prompts, rows)
    return cache


def _call(loaded: LoadedModel, cache: CompressedCache, ids: Tensor, mask: Tensor, past: int) -> Tensor:
    """Logits [batch, n, vocabulary] of tokens ``ids`` [batch, n] after ``past`` columns."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, past : past + ids.shape[1]]
    with compress(loaded.model, FullPrecision(), storage="simulated"):
        return loaded.model(
            input_ids=ids, attention_mask=mask[:, : past + ids.shape[1]], position_ids=positions,
            past_key_values=cache.hf, use_cache=True,
        ).logits  # fmt: skip
