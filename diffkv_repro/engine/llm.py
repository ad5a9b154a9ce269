"""``LLM``: prompts in, texts out, over the whole engine."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from diffkv_repro.engine.clock import Clock
from diffkv_repro.engine.kv_cache import Cache, EngineCache
from diffkv_repro.engine.model import Decoder
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.request import Request, RequestOutput, SamplingParams
from diffkv_repro.engine.runner import Runner
from diffkv_repro.engine.scheduler import Scheduler
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.zoo import LoadedModel

Prompt = str | Sequence[int]


class LLM:
    """An engine for one model: ``model`` loaded by ``load_model``, or :class:`Weights` for runs without text.

    ``cache`` is ``"fp16"``, a ``Precision`` for all tokens or a ``CompressionPolicy``. At most ``max_requests``
    requests of ``max_tokens`` tokens (prompt and answer) run at a time, in a pool of ``pool_bytes`` (default: as large
    as that can need). ``replay`` is for random weights. Errors are those of the parts.
    """

    def __init__(
        self, model: LoadedModel | Weights, cache: Cache = "fp16", *, max_requests: int = 16, max_tokens: int = 2048,
        max_batch_tokens: int = 8192, pool_bytes: int | None = None, replay: TierReplay | None = None,
        graphs: bool | None = None, watermark: float = 0.01,
    ) -> None:  # fmt: skip
        loaded = isinstance(model, LoadedModel)
        weights = Weights.of_model(model, max_positions=max_tokens) if loaded else model
        if weights.cos.shape[0] < max_tokens:
            raise ValueError(f"max_tokens is {max_tokens}; the weights were made for {weights.cos.shape[0]} positions")
        self.tokenizer: PreTrainedTokenizerBase | None = model.tokenizer if loaded else None
        self._eos = _end_tokens(model) if loaded else frozenset()
        self.cache = EngineCache(
            cache, weights, max_requests=max_requests, max_tokens=max_tokens, pool_bytes=pool_bytes, replay=replay,
            watermark=watermark,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.cache, max_requests=max_requests, max_batch_tokens=max_batch_tokens, shards=weights.shards
        )
        self.clock = Clock()
        self.runner = Runner(Decoder(weights, self.cache), max_requests=max_requests, graphs=graphs)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, arrival: float | None = None) -> int:
        """Queue a prompt, text or token ids, and return its number. It arrives now, or did at ``arrival`` seconds of
        the engine's clock."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text needs a tokenizer, which random weights have none of; give token ids")
            prompt = self.tokenizer(prompt).input_ids
        arrival = self.clock.now() if arrival is None else arrival
        request = Request(list(prompt), params or SamplingParams(), len(prompt), arrival)
        self.scheduler.add(request)
        return request.number

    def step(self) -> list[RequestOutput]:
        """One step of the engine; what changed, finished requests among it. Nothing when idle."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        chosen = self.runner.run(batch)
        now = self.clock.now()
        for request, token in zip(batch.requests, chosen, strict=True):
            request.tokens.append(token)
            request.token_times.append(now)
            reason = self._reason(request)
            if reason:
                self.scheduler.finish(request, reason)
        return [RequestOutput.of(request) for request in batch.requests]

    def cancel(self, *numbers: int) -> list[RequestOutput]:
        """Stop requests; those that had ended already are left out."""
        return [RequestOutput.of(request) for request in self.scheduler.cancel(numbers)]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Each answer as it grows, one output a token."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
        own = {self.add(prompt, given) for prompt, given in zip(prompts, each, strict=True)}
        try:
            while own:
                for output in self.step():
                    if output.number in own:
                        if output.finish_reason:
                            own.discard(output.number)
                        yield output
        finally:
            self.cancel(*own)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """The finished answers, in the order of ``prompts``."""
        last = {output.number: output for output in self.stream(prompts, params)}
        return [last[number] for number in sorted(last)]

    def _reason(self, request: Request) -> str | None:
        params, token = request.params, request.tokens[-1]
        if self.tokenizer is not None:
            ends = token in self._eos and not params.ignore_eos
            shown = request.generated[:-1] if ends else request.generated
            request.text = self.tokenizer.decode(shown, skip_special_tokens=True)
            found = [at for text in params.stop if (at := request.text.find(text)) >= 0]
            if found:
                request.text = request.text[: min(found)]
            if ends or found:
                return "stop"
        return "length" if request.is_full else None


def _end_tokens(model: LoadedModel) -> frozenset[int]:
    ends = model.model.generation_config.eos_token_id
    if ends is None:
        ends = model.tokenizer.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
