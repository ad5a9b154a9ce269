"""How fast a GPU quantises, codes and restores a KV cache (``bench codec``): every codec in a process of its own.

A native codec that ends its process costs its own rows and no others. All buffers are many times the L2 cache, so that
whatever is timed reads from memory; a plain copy of the same cache, timed beside it, is the ceiling.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffkv_repro.core.processes import Apart, ProcessFailed
from diffkv_repro.core.provenance import device_name
from diffkv_repro.core.quantize import Quantized, dequantize, quantize
from diffkv_repro.kvserve.codecs import CODECS
from diffkv_repro.kvserve.token_codes import dequantize_tokens, quantize_tokens

STAGES = (
    "copy", "quantise, eager", "quantise, fused", "dequantise, eager", "dequantise, fused",
    "codec encode", "codec decode", "whole encode", "whole decode",
)  # fmt: skip
NO_CODEC = "none"
ON_GPU = ("nvcomp-ans", "nvcomp-bitcomp", "nvcomp-cascaded", "nvcomp-lz4", "nvcomp-zstd")
SYNTHETIC = "synthetic: normal numbers, a scale for each channel, four outlier channels in keys"
_BUDGET = 0.6  # seconds that the counted repeats of a stage may take together, if there are five
_FEWEST, _WARM = 5, 2
_ANSWER_SECONDS = 240  # imports included, which a cold machine takes long for


@dataclass(frozen=True)
class CacheShape:
    """A cache in 16 bits: keys and values of all layers, [layers, 2, kv_heads, tokens, head_dim]."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def raw_bytes(self, tokens: int) -> int:
        """Of keys and values in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim * tokens


@dataclass(frozen=True)
class CodecRate:
    """Seconds (median, least, most of ``repeats``) of one stage on a cache of ``tokens``; or why there are none.

    ``raw_bytes`` is the cache in 16 bits, ``coded_bytes`` the codec's code with FP16 scales and zero points (0 for
    stages without a codec), ``copy_seconds`` the median of copying the cache in the same process.
    """

    codec: str
    stage: str
    tokens: int
    median: float
    least: float
    most: float
    repeats: int
    raw_bytes: int
    coded_bytes: int
    copy_seconds: float
    device: str
    content: str
    error: str = ""

    @property
    def rate(self) -> float:
        """Bytes of the raw cache a second; NaN where there is an error."""
        return self.raw_bytes / self.median if self.median else math.nan

    @property
    def of_copy(self) -> float:
        """The rate as a share of that of a plain copy of the cache."""
        return self.copy_seconds / self.median if self.median else math.nan

    @property
    def ratio(self) -> float:
        """Raw bytes over coded bytes; NaN without a codec."""
        return self.raw_bytes / self.coded_bytes if self.coded_bytes else math.nan

    def summary(self) -> str:
        """One line for people."""
        head = f"{self.codec}, {self.tokens:,} tokens, {self.stage}"
        if self.error:
            return f"{head}: {self.error}"
        ratio = f", ratio {self.ratio:.2f}" if self.coded_bytes else ""
        return (
            f"{head}: {self.rate / 1e9:.1f} GB/s of raw KV ({self.raw_bytes / self.most / 1e9:.1f} to "
            f"{self.raw_bytes / self.least / 1e9:.1f}), {100 * self.of_copy:.1f} % of a copy{ratio}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """What a process measures: ``codec`` (:data:`NO_CODEC`: the quantiser alone) at each of ``tokens``.

    ``sample`` [layers, 2, kv_heads, tokens, head_dim], of fewer layers and tokens, is real content (:func:`sample_of`)
    that is said over; None makes synthetic content.
    """

    codec: str
    tokens: tuple[int, ...]
    shape: CacheShape
    levels: int
    repeats: int
    device: str
    seed: int
    sample: Tensor | None = None
    content: str = SYNTHETIC


def bench_codecs(
    codecs: Sequence[str] = ON_GPU, tokens: Sequence[int] = (4096, 16384), *, shape: CacheShape | None = None,
    levels: int = 16, repeats: int = 20, device: str = "cuda", sample: Tensor | None = None, content: str = "",
    seed: int = 0,
) -> Iterator[CodecRate]:  # fmt: skip
    """The quantiser alone, then every codec behind it, as they are measured; a codec that fails gives rows that say so.

    ``sample`` and ``content`` (a word on what it is) give other numbers than synthetic ones; see :class:`Job`. Raises
    ValueError for an unknown codec or bad sizes, RuntimeError for ``cuda`` where there is none.
    """
    for name in codecs:
        CODECS.make(name)
    if not tokens or min(tokens) < 1 or repeats < 1:
        raise ValueError(f"tokens are {list(tokens)} and repeats {repeats}; both must be at least 1")
    own = shape or CacheShape()
    if sample is not None and (sample.ndim != 5 or sample[0, :, :, 0].shape != (2, own.kv_heads, own.head_dim)):
        wanted = f"[layers, 2, {own.kv_heads}, tokens, {own.head_dim}]"
        raise ValueError(f"sample is {tuple(sample.shape)}; allowed is {wanted}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("codecs are timed on a CUDA device, and there is none")
    label = SYNTHETIC if sample is None else content or "a sample, said over"
    job = Job(NO_CODEC, tuple(tokens), own, levels, repeats, device, seed, sample, label)
    jobs = [job, *(replace(job, codec=name) for name in codecs if name != NO_CODEC)]
    # All start at once, for their imports take longer than what they measure; they measure one after the other.
    waiting = [Apart(measure, own) for own in jobs]
    try:
        for own, process in zip(jobs, waiting, strict=True):
            yield from _answers(own, process)
    finally:
        for process in waiting:
            process.close()


def _answers(job: Job, process: Apart) -> Iterator[CodecRate]:
    """What a process measures, and rows of its error for the lengths that it leaves out."""
    seen = set()
    try:
        for row in process.results(_ANSWER_SECONDS):
            seen.add((row.tokens, row.stage))
            yield row
    except ProcessFailed as failure:
        for tokens in job.tokens:
            for stage in _stages(job.codec):
                if (tokens, stage) not in seen:
                    raw = job.shape.raw_bytes(tokens)
                    row = CodecRate(job.codec, stage, tokens, 0, 0, 0, 0, raw, 0, 0, _device(job), job.content)
                    yield replace(row, error=str(failure))


def _stages(codec: str) -> tuple[str, ...]:
    return STAGES[:5] if codec == NO_CODEC else STAGES[5:]


def measure(job: Job) -> Iterator[CodecRate]:
    """The rows of a job, in this process. Raises what the codec raises."""
    for tokens in job.tokens:
        kv = cache_of(job, tokens)
        own = _Case(job, tokens, kv, _seconds(lambda kv=kv, into=torch.empty_like(kv): into.copy_(kv), job))
        yield from own.quantiser() if job.codec == NO_CODEC else own.codec()


def cache_of(job: Job, tokens: int) -> Tensor:
    """FP16 [layers, 2, kv_heads, tokens, head_dim] of a job on its device."""
    shape, device = job.shape, torch.device(job.device)
    if job.sample is not None:
        sample = job.sample.to(device, torch.float16)
        layers, along = (torch.arange(count, device=device) for count in (shape.layers, tokens))
        return sample[layers % len(sample)][..., along % sample.shape[3], :].contiguous()
    size = (shape.layers, 2, shape.kv_heads, tokens, shape.head_dim)
    generator = torch.Generator(device).manual_seed(job.seed)
    kv = torch.randn(size, generator=generator, device=device, dtype=torch.float16)
    scale = torch.exp2(0.7 * torch.randn(*size[:3], 1, shape.head_dim, generator=generator, device=device))
    scale[:, 0, ..., :: max(1, shape.head_dim // 4)] *= 6.0
    return kv.mul_(scale.half())


def sample_of(pairs: Sequence[tuple[Tensor, Tensor]], shape: CacheShape) -> Tensor:
    """FP16 [layers, 2, kv_heads, tokens, head_dim] of a smaller model's (key, value) pairs [heads, tokens, channels].

    Its heads are put side by side to ``head_dim`` channels, and as many together as make whole layers of ``shape``.
    Raises ValueError where they do not make one.
    """
    parts = []
    for side in zip(*pairs, strict=True):
        heads = torch.cat([tensor.to("cpu", torch.float16) for tensor in side])
        beside = -(-shape.head_dim // heads.shape[-1])
        layers = len(heads) // (beside * shape.kv_heads)
        if not layers:
            need = beside * shape.kv_heads
            raise ValueError(f"the sample has {len(heads)} heads of {heads.shape[-1]} channels; a layer takes {need}")
        whole = heads[: layers * beside * shape.kv_heads].unflatten(0, (layers, shape.kv_heads, beside))
        parts.append(torch.cat(whole.unbind(2), dim=-1)[..., : shape.head_dim])
    return torch.stack(parts, dim=1)


@dataclass(frozen=True)
class _Case:
    """One cache in one process."""

    job: Job
    tokens: int
    kv: Tensor
    copied: tuple[float, float, float, int]

    def quantiser(self) -> Iterator[CodecRate]:
        """The copy, and the quantiser both ways; the fused one has to give the codes of the other."""
        levels, stored = self.job.levels, quantize_tokens(self.kv, self.job.levels)
        yield self._row("copy", self.copied)
        yield self._row("quantise, eager", self._times(lambda: quantize(self.kv, levels)))
        yield self._row("quantise, fused", self._times(lambda: quantize_tokens(self.kv, levels)))
        for layer, codes in zip(self.kv, stored.codes, strict=True):  # piece by piece: working copies are wider
            if not torch.equal(quantize(layer, levels).codes, codes):
                raise RuntimeError("the fused quantiser gives other codes than core.quantize")
        yield self._row("dequantise, eager", self._times(lambda: dequantize(stored, torch.float16)))
        yield self._row("dequantise, fused", self._times(lambda: dequantize_tokens(stored, torch.float16)))

    def codec(self) -> Iterator[CodecRate]:
        """The codec on the codes alone, and the whole way with the fused quantiser; codes have to come back."""
        codec, levels, stored = CODECS.make(self.job.codec), self.job.levels, quantize_tokens(self.kv, self.job.levels)
        count = stored.codes.numel()
        coded = codec.encode_device(stored.codes, levels)
        if not torch.equal(codec.decode_device(coded, count, levels), stored.codes.view(-1)):
            raise RuntimeError("other codes came back")
        size = coded.numel() + 2 * (stored.scale.numel() + stored.zero.numel())

        def back() -> Tensor:
            codes = codec.decode_device(coded, count, levels).view(stored.codes.shape)
            whole = Quantized(codes, stored.scale, stored.zero, levels, "token", stored.group)
            return dequantize_tokens(whole, torch.float16)

        for stage, call in (
            ("codec encode", lambda: codec.encode_device(stored.codes, levels)),
            ("codec decode", lambda: codec.decode_device(coded, count, levels)),
            ("whole encode", lambda: codec.encode_device(quantize_tokens(self.kv, levels).codes, levels)),
            ("whole decode", back),
        ):
            yield self._row(stage, self._times(call), size)

    def _times(self, call: Callable[[], object]) -> tuple[float, float, float, int]:
        return _seconds(call, self.job)

    def _row(self, stage: str, times: tuple[float, float, float, int], coded: int = 0) -> CodecRate:
        job, raw = self.job, self.job.shape.raw_bytes(self.tokens)
        return CodecRate(
            job.codec, stage, self.tokens, *times, raw, coded, self.copied[0], _device(job), job.content
        )  # fmt: skip


def _seconds(call: Callable[[], object], job: Job) -> tuple[float, float, float, int]:
    """Median, least and most seconds of a call, and how often it was timed; CUDA events on a GPU."""
    for _ in range(_WARM):
        call()
    times: list[float] = []
    while len(times) < job.repeats and (len(times) < _FEWEST or sum(times) < _BUDGET):
        if job.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times), min(times), max(times), len(times)


def _device(job: Job) -> str:
    return device_name() if job.device == "cuda" else job.device
