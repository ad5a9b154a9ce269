"""``LLM``: prompts in, texts out, over the whole engine."""

import operator
from collections import deque
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
        self._vocab = weights.embedding.shape[0]
        self._followed: dict[int, deque[RequestOutput]] = {}  # what a stream has not yet handed on, by request

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, arrival: float | None = None) -> int:
        """Queue a prompt, text or token ids, and return its number.

        ``arrival`` is when it came by the engine's clock, now unless given: latencies count from it. Raises ValueError
        for what is no prompt of this model, or could never run.
        """
        params = params or SamplingParams()
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            what = "a text needs" if isinstance(prompt, str) else "stop strings need"
            raise ValueError(f"{what} a tokenizer, which random weights have none of; give token ids")
        tokens = self._tokens(self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)
        arrival = self.clock.now() if arrival is None else arrival
        request = Request(tokens, params, len(tokens), arrival)
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
        return self._handed([RequestOutput.of(request) for request in batch.requests])

    def cancel(self, *numbers: int) -> list[RequestOutput]:
        """Stop requests; those that had ended already are left out."""
        return self._handed([RequestOutput.of(request) for request in self.scheduler.cancel(numbers)])

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Each answer as it grows, one output a token."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
        own: dict[int, deque[RequestOutput]] = {}
        try:
            for prompt, given in zip(prompts, each, strict=True):
                number = self.add(prompt, given)
                own[number] = self._followed[number] = deque()
            while own:
                if not any(own.values()):  # a step of another stream may have brought something already
                    self.step()
                for number, outputs in list(own.items()):
                    while outputs:
                        output = outputs.popleft()
                        if output.finish_reason:
                            del own[number], self._followed[number]
                        yield output
        finally:
            for number in own:
                del self._followed[number]
            self.cancel(*own)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """The finished answers, in the order of ``prompts``."""
        last = {output.number: output for output in self.stream(prompts, params)}
        return [last[number] for number in sorted(last)]

    def _handed(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """``outputs``, which the streams that wait for them have got too."""
        for output in outputs:
            if output.number in self._followed:
                self._followed[output.number].append(output)
        return outputs

    def _tokens(self, prompt: Sequence[int]) -> list[int]:
        """As a list. What is no row of the embedding would end every request of its batch, on a GPU the process."""
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is a text or token ids, whole numbers; {error}") from error
        wrong = next((token for token in tokens if not 0 <= token < self._vocab), None)
        if wrong is not None:
            raise ValueError(f"a prompt holds token {wrong}; allowed are 0 to {self._vocab - 1}")
        return tokens

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
