"""Scoring and generation in which the answer has come through the compressed cache.

A model call that is one prefill never reads what was stored, and the first token after a prompt comes of the exact
prefill too. So a prompt's last tokens are held back and decoded: then every token of the answer has read the cache.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diffkv_repro.cache import CompressedCache, Session
from diffkv_repro.evaluation.teacher_forced import NotReadError

_CHUNK = 128  # tokens decoded in one call: what bounds the memory of logits


@dataclass(frozen=True)
class KVUse:
    """What the cache of one request held when its answer was complete; in a batch, the mean over its requests.

    ``nominal``, ``true`` bytes over FP16; ``reads`` queries answered from the cache, summed over layers; ``tokens``
    stored at each precision, or ``pruned``, summed over the heads of layers with full attention.
    """

    nominal: float
    true: float
    reads: int
    tokens: dict[str, float]

    @classmethod
    def of(cls, cache: CompressedCache) -> "KVUse":
        """The use of ``cache`` as it is now."""
        size, batch = cache.kv_bytes(), len(cache.rows.positions)
        tokens = {name: count / batch for name, count in cache.tokens().items()}
        return cls(size.nominal_ratio, size.true_ratio, cache.reads, tokens)

    @classmethod
    def joined(cls, uses: Sequence["KVUse"]) -> "KVUse":
        """Mean ratios and tokens, and all reads, of several."""
        names = sorted({name for use in uses for name in use.tokens})
        return cls(
            nominal=fmean(use.nominal for use in uses),
            true=fmean(use.true for use in uses),
            reads=sum(use.reads for use in uses),
            tokens={name: fmean(use.tokens.get(name, 0) for use in uses) for name in names},
        )

    @classmethod
    def summary(cls, uses: Sequence["KVUse"]) -> dict[str, Any]:
        """:meth:`joined` as plain values, with the number of requests."""
        return {"requests": len(uses)} | asdict(cls.joined(uses))


@dataclass(frozen=True)
class Row:
    """A sequence whose last ``scored`` tokens are asked for; the last ``decoded`` of its inputs go through the cache.

    Its inputs are ``tokens`` without the last one, which is only predicted; those before the decoded ones its prompt.
    """

    tokens: Sequence[int]
    scored: int
    decoded: int

    def __post_init__(self) -> None:
        inputs = len(self.tokens) - 1
        if not 1 <= self.scored <= inputs:
            raise ValueError(f"{self.scored} of {len(self.tokens)} tokens cannot be scored; allowed are 1 to {inputs}")
        if not 0 <= self.decoded < inputs:
            raise ValueError(f"{self.decoded} of {inputs} inputs cannot be decoded; at least one is the prompt")

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that are prefilled."""
        return tuple(self.tokens[: len(self.tokens) - 1 - self.decoded])


@dataclass(frozen=True)
class Scores:
    """``logprobs`` [scored] of a row's tokens, the most likely ones ``greedy`` [scored], ``last`` [vocabulary]:
    log-probabilities at the last position, for rows that differ in their last token only."""

    logprobs: Tensor
    greedy: Tensor
    last: Tensor


@torch.no_grad()
def score(session: Session, model: Any, rows: Sequence[Row], *, pad: int = 0) -> tuple[list[Scores], KVUse]:
    """Score ``rows``, which agree in ``decoded``, as one batch with padding on the left.

    Rows with one prompt between them (the choices of a question) are prefilled once. Inside ``compress``. Raises
    NotReadError where the cache answered fewer queries than it was to, or none although there was something to ask.
    """
    decoded = rows[0].decoded
    if any(row.decoded != decoded for row in rows):
        raise ValueError(f"rows of one batch decode {sorted({row.decoded for row in rows})} tokens; they must agree")
    ids, mask = left_padded([row.tokens[:-1] for row in rows], pad, model.device)
    columns = ids.shape[1]
    first = columns - decoded
    targets, _ = left_padded([row.tokens[1:] for row in rows], pad, model.device)
    ahead = max(row.scored for row in rows) - decoded
    cache = session.new_cache()
    shared = len({row.prompt for row in rows}) == 1
    different = 1 if shared else len(rows)
    logits = _call(model, cache, ids[:different], mask[:different], slice(0, first), keep=max(1, ahead))
    if different < len(rows):
        cache.hf.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=model.device))
        logits = logits.expand(len(rows), -1, -1)
    found = [_of_targets(logits, targets[:, first - logits.shape[1] : first])]
    for start in range(first, columns, _CHUNK):
        span = slice(start, min(start + _CHUNK, columns))
        logits = _call(model, cache, ids, mask, span)
        found.append(_of_targets(logits, targets[:, span]))
    _require_reads(session, cache, max(decoded, int(columns > 1)))
    logprobs, greedy = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    last = logits[:, -1].float().log_softmax(dim=-1)
    results = [
        Scores(logprobs[index, -row.scored :], greedy[index, -row.scored :], last[index])
        for index, row in enumerate(rows)
    ]
    return results, KVUse.of(cache)


@torch.no_grad()
def hold_back(session: Session, model: Any, ids: Tensor, mask: Tensor, decoded: int) -> CompressedCache:
    """A cache of the prompts ``ids`` [batch, tokens], padded on the left, without their last ``decoded`` tokens.

    To be handed to ``model.generate``, with the whole prompts, as ``past_key_values=cache.hf``: the tokens held back
    are then decoded. The first token of the shortest prompt always stays in front; the cache is empty where that leaves
    nothing to hold back.
    """
    decoded = min(decoded, int(mask.sum(dim=1).min()) - 1)
    cache = session.new_cache()
    if decoded > 0:
        _call(model, cache, ids, mask, slice(0, ids.shape[1] - decoded), keep=1)
    return cache


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of ``rows``, [batch, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _call(model: Any, cache: CompressedCache, ids: Tensor, mask: Tensor, span: slice, keep: int = 0) -> Tensor:
    """Logits of the columns ``span``, the last ``keep`` of them (0: all), which enter the cache."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    return model(
        input_ids=ids[:, span],
        attention_mask=mask[:, : span.stop],
        position_ids=positions[:, span],
        past_key_values=cache.hf,
        use_cache=True,
        logits_to_keep=keep,
    ).logits


def _of_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = logits.float().log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]
    return logprobs, logits.argmax(dim=-1)


def _require_reads(session: Session, cache: CompressedCache, tokens: int) -> None:
    wanted = tokens * len(cache.layers)
    if cache.reads < wanted:
        raise NotReadError(
            f"{session.method.label}: {cache.reads} reads of the compressed cache where {wanted} were due; the score "
            "would be that of FP16"
        )
