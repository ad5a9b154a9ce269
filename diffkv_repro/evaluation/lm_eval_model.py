"""lm-eval's Hugging Face model, with every answer read from a compressed KV cache."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from diffkv_repro.cache import Session, compress
from diffkv_repro.evaluation.answers import Answers
from diffkv_repro.evaluation.decoding import KVUse, Row, Scores, hold_back, score
from diffkv_repro.evaluation.finished import identity_of
from diffkv_repro.evaluation.methods import make_method, methods, parameters
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.models import LoadedModel, load_model

logger = logging.getLogger("diffkv_repro")

# Arguments of HFLM that make sense for a model that is loaded already.
_PASSED_ON = (
    "max_length", "truncation", "add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking",
    "chat_template_args",
)  # fmt: skip

_SHARING = 16  # choices of one question in a batch, whatever the batch size: they share their prompt


class CompressedLM(HFLM):
    """``--model diffkv --model_args pretrained=smollm2-135m,method=diffkv,policy=K8V4-K4V2,alpha_low=0.02``.

    - ``pretrained``: what ``load_model`` takes; ``device`` and ``dtype`` as there.
    - ``method`` and any of its options, as ``make_method`` takes them; ``storage`` simulated (quicker) or packed.
    - ``min_decoded``: so many last tokens of every context are decoded through the cache, so that the first token of
      the answer has read it as well. With 0, as on a server, that one comes of the exact prefill; then a continuation
      of one token reads nothing, and is refused.
    - ``rolling_prefix``: for perplexities, so many tokens of a window are its prompt (half of it at most), and their
      scores are exact; the rest is decoded.
    - ``finished``: an SQLite file of answers; a request that is in there is not run again.

    Log-likelihoods are of the continuation's tokens, decoded one by one after a prefill of their context. Requests of
    one batch have equally long continuations, so that no answer depends on the others in its batch.
    """

    METHOD: ClassVar[str | None] = None

    def __init__(
        self,
        pretrained: str | LoadedModel = "smollm2-135m",
        *,
        method: str | None = None,
        storage: str = "simulated",
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        min_decoded: int = 1,
        rolling_prefix: int = 128,
        finished: str | Path | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        del max_batch_size  # lm-eval always passes it; it is for automatic batch sizes
        if trust_remote_code:
            raise ValueError("trust_remote_code is True; code that comes with a model is never run here")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; write a whole number of at least 1")
        for name, value, least in (("min_decoded", min_decoded, 0), ("rolling_prefix", rolling_prefix, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if None not in (self.METHOD, method) and method != self.METHOD:
            raise ValueError(f"--model {self.METHOD} with method={method}; write --model diffkv to choose by method")
        passed_on = {name: options.pop(name) for name in _PASSED_ON if name in options}
        loaded = pretrained
        if not isinstance(loaded, LoadedModel):
            loaded = load_model(str(pretrained), device=_device(device), dtype=_dtype(dtype))
        self.loaded = loaded
        self.method = make_method(method or self.METHOD or "diffkv", loaded, **options)
        self.storage = storage
        self.min_decoded, self.rolling_prefix = min_decoded, rolling_prefix
        kept = {"min_decoded": min_decoded, "rolling_prefix": rolling_prefix}
        identity = identity_of(loaded, self.method, storage) | passed_on | kept
        with _without_warnings():
            super().__init__(
                loaded.model, backend="causal", tokenizer=loaded.tokenizer, batch_size=int(batch_size), **passed_on
            )
        self.pretrained = loaded.name
        self.answers = Answers(identity, finished)
        self.cache_hook = _Hook(self)
        self._session: Session | None = None
        self._use: KVUse | None = None
        with self._compressed():
            pass  # says at once where model, method and storage do not fit

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's own cache: its key names neither model nor method, and it is a pickle."""
        raise ValueError(
            "use_cache would mix up the answers of different methods; give finished=<file> among the model's "
            "arguments, or run `diffkv-repro lm-eval run --use_cache <file>`, which does that"
        )

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        def run(rest: list) -> None:
            with self._compressed():
                HFLM.loglikelihood(self, rest, disable_tqdm)

        return [(total, greedy) for total, greedy in self.answers.collect("loglikelihood", requests, run)]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        def run(rest: list) -> None:
            bar = tqdm(rest, disable=disable_tqdm, desc="Running loglikelihood_rolling requests")
            with self._compressed():
                for request in bar:
                    total, use = self._rolled(request.args[0])
                    self.answers.finish("loglikelihood_rolling", [(request.args, total)], use)

        return self.answers.collect("loglikelihood_rolling", requests, run)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        def run(rest: list) -> None:
            with self._compressed():
                HFLM.generate_until(self, rest, disable_tqdm)

        return self.answers.collect("generate_until", requests, run)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: model, method, storage, and what the caches were measured to hold."""
        kv = self.answers.summaries()
        for task, found in kv.items():
            logger.info(
                "%s: %s, %s storage, %d requests: KV %.1f %% of FP16 nominally, %.1f %% in truth; %d reads",
                task, self.method.label, self.storage, found["requests"], 100 * found["nominal"], 100 * found["true"],
                found["reads"],
            )  # fmt: skip
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_sha": self.loaded.fingerprint,
            "diffkv_repro": {
                "model": self.loaded.name,
                "weights": self.loaded.precision,
                "method": self.method.label,
                "parameters": parameters(self.method),
                "storage": self.storage,
                "min_decoded": self.min_decoded,
                "rolling_prefix": self.rolling_prefix,
                "resumed_requests": self.answers.resumed,
                "kv": kv,
            },
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> None:
        """Finish requests given as texts, context and continuation."""
        # Continuations that differ in their last token only (the letters of a multiple choice) share a row.
        rows: dict[tuple, Row] = {}
        members: dict[tuple, list[tuple[tuple[str, str], list[int]]]] = defaultdict(list)
        for texts, context, continuation in requests:
            row = self._row(context, continuation)
            key = (tuple(row.tokens[:-1]), row.scored)
            rows.setdefault(key, row)
            members[key].append((texts, continuation))
        sharing = list(members.values())
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for batch, scores, use in self._scored(list(rows.values())):
                answers = [
                    (texts, _total(found, continuation))
                    for index, found in zip(batch, scores, strict=True)
                    for texts, continuation in sharing[index]
                ]
                self.answers.finish("loglikelihood", answers, use)
                bar.update(len(answers))

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        raise NotReadError("one forward call over a whole text never reads the compressed cache")

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        # With several beams prompts are multiplied after the cache was filled, so that nothing can be held back.
        single = options.get("num_beams", 1) == options.get("num_return_sequences", 1) == 1
        held = self.min_decoded if single else 0
        given = hold_back(self._session, self.model, context, options["attention_mask"], held)
        output = super()._model_generate(context, max_length, stop, past_key_values=given.hf, **options)
        self._use = KVUse.of(given)
        return output

    def _row(self, context: list[int], continuation: list[int]) -> Row:
        limit = self.max_length
        if len(continuation) > limit:
            raise ValueError(f"a continuation of {len(continuation)} tokens is more than the context of {limit}")
        tokens = (context + continuation)[-(limit + 1) :]
        left = len(tokens) - len(continuation)
        if left < len(context):
            logger.warning("a context of %d tokens was cut to its last %d", len(context), left)
        return Row(tokens, len(continuation), len(continuation) - 1 + min(self.min_decoded, left - 1))

    def _rolled(self, text: str) -> tuple[float, KVUse | None]:
        """Log-likelihood of a whole text, window by window."""
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        rows = []
        for context, continuation in map(make_disjoint_window, windows):
            inputs = len(context) + len(continuation) - 1
            prompt = max(len(context) - self.min_decoded, min(self.rolling_prefix, inputs // 2), 1)
            rows.append(Row(context + continuation, len(continuation), inputs - prompt))
        total, uses = 0.0, []
        for _, scores, use in self._scored(rows):
            total += sum(float(found.logprobs.double().sum()) for found in scores)
            uses += [use] * len(scores)
        return total, KVUse.joined(uses) if uses else None

    def _scored(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Scores], KVUse]]:
        """Indices, scores and cache use of batches of rows that decode equally many tokens; the longest first."""

        def rank(index: int) -> tuple:
            return rows[index].decoded, len(rows[index].tokens), rows[index].tokens

        order = sorted(range(len(rows)), key=rank, reverse=True)
        while order:
            first = rows[order[0]]
            alike = [index for index in order[:_SHARING] if rows[index].decoded == first.decoded]
            batch = list(takewhile(lambda index, prompt=first.prompt: rows[index].prompt == prompt, alike))
            if len(batch) < self.batch_size:
                batch = [index for index in order[: self.batch_size] if rows[index].decoded == first.decoded]
            del order[: len(batch)]
            chosen = [rows[index] for index in batch]
            yield batch, *score(self._session, self.model, chosen, pad=self.tokenizer.pad_token_id or 0)

    @contextmanager
    def _compressed(self) -> Iterator[None]:
        with compress(self.model, self.method, storage=self.storage) as self._session:
            yield


class _Hook:
    """HFLM reports each generated answer to its cache hook as soon as its batch is done."""

    def __init__(self, model: CompressedLM) -> None:
        self._model = model

    def add_partial(self, kind: str, arguments: tuple, answer: Any) -> None:
        self._model.answers.finish(kind, [(arguments, answer)], self._model._use)


@cache
def register_models() -> tuple[str, ...]:
    """Make lm-eval know ``diffkv``, and every other method by its name; returns the names."""
    for name in methods():
        kind = CompressedLM if name == "diffkv" else type(f"CompressedLM_{name}", (CompressedLM,), {"METHOD": name})
        model_registry.register(name, target=kind)
    return methods()


def _total(scores: Scores, continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is what greedy decoding gives."""
    total = scores.logprobs[:-1].double().sum() + scores.last[continuation[-1]].double()
    return float(total), scores.greedy.tolist() == continuation


def _device(name: str | None) -> str | None:
    """lm-eval asks for ``cuda:0`` wherever nothing else is asked for; HFLM too falls back to the CPU."""
    if name is None or torch.cuda.is_available() or not str(name).startswith("cuda"):
        return name
    logger.info("no CUDA device here: running on the CPU")
    return "cpu"


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if name in (None, "auto"):
        return None
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {name!r}; write float32, float16, bfloat16 or auto")
    return found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """HFLM warns that a loaded model makes it ignore arguments: those are not passed."""
    other = logging.getLogger(HFLM.__module__)
    level = other.level
    other.setLevel(logging.ERROR)
    try:
        yield
    finally:
        other.setLevel(level)
