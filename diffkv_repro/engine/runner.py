"""Runs the batches of the scheduler: host numbers in, sampled tokens out; generation steps as CUDA graphs on a GPU."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.engine.model import Decoder
from diffkv_repro.engine.request import Request
from diffkv_repro.engine.scheduler import Batch

_SHORTEST_BOUND = 1024  # tokens: kernels are planned for lengths up to a power of two from here on


class StepInputs:
    """Where a generation step of ``batch`` rows reads its numbers; a graph keeps these addresses.

    ``tokens``, ``rows`` (-1: no request), ``columns`` and ``prompts`` are rows of one int32 tensor, which one copy
    fills from memory that the device can read by itself.
    """

    def __init__(self, batch: int, max_requests: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._staged = torch.zeros(4, batch, dtype=torch.int32, pin_memory=pinned)
        self._staged[1] = -1
        self._staged_active = torch.zeros(max_requests, dtype=torch.uint8, pin_memory=pinned)
        self._numbers = self._staged.to(device)
        self.active = self._staged_active.to(device)
        self.tokens, self.rows, self.columns, self.prompts = self._numbers.unbind()

    def fill(self, requests: Sequence[Request]) -> None:
        """The rows of ``requests``, then rows of no request. What was filled in before must have been used up."""
        numbers = np.zeros(self._staged.shape, dtype=np.int32)
        numbers[1, len(requests) :] = -1
        numbers[:, : len(requests)] = [
            [request.tokens[-1] for request in requests], [request.slot for request in requests],
            [request.cached for request in requests], [request.entered for request in requests],
        ]  # fmt: skip
        active = np.zeros(self._staged_active.shape, dtype=np.uint8)
        active[numbers[1, : len(requests)]] = 1
        for staged, values, own in (
            (self._staged, numbers, self._numbers), (self._staged_active, active, self.active),
        ):  # fmt: skip
            staged.copy_(torch.from_numpy(values))
            own.copy_(staged, non_blocking=True)

    def arguments(self) -> tuple[Tensor, ...]:
        """Of :meth:`Decoder.step`, but for the bound."""
        return self.tokens, self.active, self.rows, self.columns, self.prompts


class Runner:
    """``decoder`` for up to ``max_requests`` requests at a time.

    With ``graphs`` (default: on CUDA devices and one worker) a generation step of each batch size and length, rounded
    up, is captured at its first use and replayed from then on.
    """

    def __init__(self, decoder: Decoder, *, max_requests: int, graphs: bool | None = None) -> None:
        self.decoder, self.max_requests = decoder, max_requests
        self.device = decoder.weights.device
        alone = decoder.weights.shards.size == 1
        self.graphs = (self.device.type == "cuda" and alone) if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device; the weights are on {self.device}")
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, StepInputs, Tensor]] = {}
        # One at a time is replayed, and its logits are used up before the next: they can share what they work in.
        self._workspace = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        """The next token of each request of the batch."""
        requests = batch.requests
        logits = self._prompt(requests) if batch.prompts else self._step(requests)
        return self._sample(logits[: len(requests)], requests)

    def _prompt(self, requests: Sequence[Request]) -> Tensor:
        longest = max(len(request.tokens) for request in requests)
        tokens = torch.tensor([request.tokens + [0] * (longest - len(request.tokens)) for request in requests])
        slots = [request.slot for request in requests]
        rows, lengths = (
            torch.tensor(values, dtype=torch.int32) for values in (slots, [len(own.tokens) for own in requests])
        )
        return self.decoder.prompt(slots, *(own.to(self.device) for own in (rows, tokens, lengths)))

    def _step(self, requests: Sequence[Request]) -> Tensor:
        longest = max(len(request.tokens) for request in requests)
        bound = min(max(_SHORTEST_BOUND, _power_of_two(longest)), self.decoder.cache.max_tokens)
        if not self.graphs:
            inputs = StepInputs(len(requests), self.max_requests, self.device)
            inputs.fill(requests)
            return self.decoder.step(*inputs.arguments(), bound)
        size = min(_graph_size(len(requests)), self.max_requests)
        if (size, bound) not in self._captured:
            self._captured[size, bound] = self._capture(size, bound)
        graph, inputs, logits = self._captured[size, bound]
        inputs.fill(requests)
        graph.replay()
        self.decoder.cache.memory.count_steps(1)
        return logits

    def _capture(self, size: int, bound: int) -> tuple[torch.cuda.CUDAGraph, StepInputs, Tensor]:
        inputs = StepInputs(size, self.max_requests, self.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles; with no request in it, a step changes nothing
            self.decoder.step(*inputs.arguments(), bound)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._workspace):
            logits = self.decoder.step(*inputs.arguments(), bound)
        return graph, inputs, logits

    def management(self, requests: Sequence[Request]) -> tuple[Callable[[], object], Callable[[], object]]:
        """What a step of these does to pages, and its decisions on tokens, each alone: to be timed. As graphs where
        steps are."""
        inputs = StepInputs(len(requests), self.max_requests, self.device)
        inputs.fill(requests)
        cache = self.decoder.cache
        reserve = self._repeatable(lambda: cache.memory.reserve_step(inputs.active))

        def counted() -> None:
            reserve()
            if self.graphs:
                cache.memory.count_steps(1)

        if cache.rule is None:
            return counted, lambda: None
        return counted, self._repeatable(lambda: cache.decide(inputs.rows, inputs.columns, inputs.prompts))

    def _repeatable(self, call: Callable[[], object]) -> Callable[[], object]:
        call()
        if not self.graphs:
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            call()
        return graph.replay

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        chosen = logits.argmax(dim=-1)
        for row, request in enumerate(requests):
            if request.params.temperature > 0:
                chosen[row] = _drawn(logits[row], request)
        return chosen.tolist()


def _drawn(logits: Tensor, request: Request) -> Tensor:
    """A token by Gumbel noise that depends on the request's seed and the position alone."""
    generator = torch.Generator().manual_seed(hash((request.params.seed, len(request.tokens))) & 0x7FFFFFFF)
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator).clamp(1e-20, 1 - 1e-7)))
    below = logits.double() - logits.double().max()  # the best stays 0, however small the temperature
    return (below / request.params.temperature + noise.to(logits.device)).argmax()


def _graph_size(requests: int) -> int:
    """Rows that a graph for so many requests has: a power of two, and from 16 on a multiple of 16, then of 64."""
    if requests <= 16:
        return _power_of_two(requests)
    unit = 16 if requests <= 128 else 64
    return -(-requests // unit) * unit


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
