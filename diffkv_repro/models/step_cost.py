"""What executing a model costs in one step, from random numbers at its shape: half of Figure 13b."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkv_repro.models.shapes import ModelShape

_CHUNK = 8  # requests of a prompt batch that run at once: their activations then fit


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step of the whole model, median of ``repeats``; ``phase`` is ``prompt`` or ``generation``."""

    phase: str
    batch: int
    length: int
    median: float
    repeats: int


class ModelStep:
    """The matrix products, norms, activation and attention of one layer of ``shape``, run once for each layer.

    Weights and keys and values are half precision on CUDA devices, and one layer's serve for all: where they are larger
    than the device's cache, as at the papers' shapes, each pass reads them from memory just as a model's own would be.
    Rotation of keys, sampling and the scheduler are left out. Shapes without experts only, else ValueError.
    """

    def __init__(self, shape: ModelShape, *, device: torch.device | str, seed: int = 0) -> None:
        if shape.experts > 1:
            raise ValueError(f"{shape.name} is a mixture of experts; its step is not measured")
        self.shape, self.device = shape, torch.device(device)
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self._generator = torch.Generator(self.device).manual_seed(seed)
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.inward = self._random(rows, shape.hidden)
        self.outward = self._random(shape.hidden, shape.heads * shape.head_dim)
        self.gate_up = self._random(2 * shape.intermediate, shape.hidden)
        self.down = self._random(shape.hidden, shape.intermediate)
        self.head = self._random(shape.vocab, shape.hidden)

    def cost(self, phase: str, batch: int, length: int, repeats: int) -> StepCost:
        """One step: ``generation`` of a token after ``length`` cached ones, or the ``prompt`` of ``length`` tokens.

        Prompts run a few at a time through one layer, whose time is then taken once for each layer.
        """
        if phase not in ("prompt", "generation"):
            raise ValueError(f"phase is {phase!r}; allowed are prompt and generation")
        for name, value in (("batch", batch), ("length", length), ("repeats", repeats)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        with torch.inference_mode():
            call = self._prompt(batch, length) if phase == "prompt" else self._generation(batch, length)
            seconds = [self._seconds(call) for _ in range(repeats + 1)][1:]  # the first warms up
        layers = self.shape.layers if phase == "prompt" else 1
        return StepCost(phase, batch, length, layers * statistics.median(seconds), repeats)

    def _generation(self, batch: int, length: int) -> Callable[[], Tensor]:
        keys, values = self._random(2, batch, self.shape.kv_heads, length, self.shape.head_dim)
        hidden = self._random(batch, 1, self.shape.hidden)

        def step() -> Tensor:
            out = hidden
            for _ in range(self.shape.layers):
                out = self._layer(out, keys, values)
            return F.linear(out, self.head)

        return step

    def _prompt(self, batch: int, length: int) -> Callable[[], Tensor | None]:
        hidden = self._random(min(batch, _CHUNK), length, self.shape.hidden)

        def step() -> Tensor | None:
            out = None
            for start in range(0, batch, _CHUNK):
                out = self._layer(hidden[: batch - start])
            return out

        return step

    def _layer(self, hidden: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        shape, (batch, tokens, _) = self.shape, hidden.shape
        projected = F.linear(F.rms_norm(hidden, (shape.hidden,)), self.inward)
        heads = projected.view(batch, tokens, -1, shape.head_dim).transpose(1, 2)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if keys is not None and values is not None:  # the new token is written into the cache
            keys[:, :, -1:], values[:, :, -1:] = key, value
            key, value = keys, values
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=keys is None, enable_gqa=shape.heads > shape.kv_heads
        )
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(batch, tokens, -1), self.outward)
        gate, up = F.linear(F.rms_norm(hidden, (shape.hidden,)), self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._synchronise()
        started = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - started

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _random(self, *size: int) -> Tensor:
        # Small numbers: the sum over layers then stays far from the largest half.
        return torch.randn(size, generator=self._generator, device=self.device, dtype=self.dtype) * 0.02
