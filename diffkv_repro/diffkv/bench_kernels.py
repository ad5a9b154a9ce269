"""Time decode attention over pages against the fastest FP16 attention at hand (Figure 15a): ``bench kernels``.

Everything is timed as a replayed CUDA graph that goes through several layers' caches in turn, each far larger than the
L2 cache, so that every read comes from memory; medians of many replays, and the bandwidth of plain reading beside them.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import paged_ops
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.synthetic import random_view

MIXES: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "K8V8": (("K8V8",), (1.0,)),
    "K8V4": (("K8V4",), (1.0,)),
    "K4V4": (("K4V4",), (1.0,)),
    "K4V2": (("K4V2",), (1.0,)),
    "30 % K8V4, 60 % K4V2, 10 % pruned": (("K8V4", "K4V2"), (0.3, 0.6)),
    "FP16": (("FP16",), (1.0,)),
}
"""Tiers and the share of the tokens in each; what is missing to 1 is pruned. "FP16" is this kernel on FP16 pages."""

_COLD_BYTES = 400e6  # of all layers together: several times the L2 cache of any GPU
_GEOMETRY = ("K8V4:1/2", "K8V4", "K4V2:2/4", "K4V2")  # what the page size is chosen for (official code)
_STEP = 32  # tokens that the CUDA kernel takes at a time


@dataclass(frozen=True)
class KernelTiming:
    """Microseconds a layer (median, least, most of ``repeats``) of one attention at one batch size and length.

    ``kernel`` is the implementation (``cuda``, ``triton``, ``cuDNN``, ``flash``, ``flashinfer``), ``cache`` what it
    reads: one of :data:`MIXES`, or ``FP16 contiguous``. ``read_bytes`` is what one layer has to move: codes, scales,
    and with ``scores`` the read and the write of each score. ``ceiling`` is the bandwidth of plain reading, bytes/s.
    """

    kernel: str
    cache: str
    batch: int
    length: int
    scores: bool
    median: float
    least: float
    most: float
    repeats: int
    read_bytes: float
    ceiling: float
    device: str

    @property
    def of_ceiling(self) -> float:
        """Bytes over time as a share of the read bandwidth measured in the same run."""
        return self.read_bytes / (self.median * 1e-6) / self.ceiling

    def summary(self) -> str:
        """One line for people."""
        scores = ", scores updated" if self.scores else ""
        return (
            f"{self.batch} x {self.length:,} tokens, {self.kernel} on {self.cache}{scores}: {self.median:.1f} us "
            f"({self.least:.1f} to {self.most:.1f}), {100 * self.of_ceiling:.0f} % of the read bandwidth"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def bench_kernels(
    batches: Sequence[int] = (32, 128), lengths: Sequence[int] = (4096, 16384), mixes: Sequence[str] = tuple(MIXES), *,
    kv_heads: int = 8, query_heads: int = 32, head_dim: int = 128, repeats: int = 30, triton_too: bool = True,
    seed: int = 0,
) -> Iterator[KernelTiming]:  # fmt: skip
    """Every mix with and without score update, and every FP16 peer that this machine has, as they are measured.

    Raises ValueError for an unknown mix, RuntimeError without a CUDA device.
    """
    unknown = [name for name in mixes if name not in MIXES]
    if unknown:
        raise ValueError(f"unknown mix {unknown[0]!r}; there are {', '.join(MIXES)}")
    if not torch.cuda.is_available():
        raise RuntimeError("kernels are timed on a CUDA device, and there is none")
    ceiling = read_bandwidth(repeats)
    device = torch.cuda.get_device_name()
    for batch in batches:
        for length in lengths:
            case = _Case(batch, length, kv_heads, query_heads, head_dim, repeats, seed, ceiling, device)
            yield from case.peers()
            for name in mixes:
                yield from case.paged(name, triton_too=triton_too)


def layouts_of(mix: str, head_dim: int = 128) -> list[PageLayout]:
    """Pages of one of :data:`MIXES`.

    Two tiers share the page size of the official code. A single tier is free to choose: its page holds as many tokens
    as that one would, rounded up to whole steps of the kernel.
    """
    shared = [
        PageLayout(Precision.parse(name), head_dim, search_page_bytes(_GEOMETRY, head_dim)) for name in MIXES[mix][0]
    ]
    if len(shared) > 1:
        return shared
    return [PageLayout.holding(shared[0].precision, head_dim, -(-shared[0].tokens // _STEP) * _STEP)]


def read_bandwidth(repeats: int = 30) -> float:
    """Bytes per second of summing a buffer much larger than any cache."""
    buffer = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    median, _, _ = graph_times(lambda _: buffer.sum(), 2, repeats)
    return buffer.numel() * 4 / (median * 1e-6)


def fastest_peer(timings: Sequence[KernelTiming], batch: int, length: int) -> KernelTiming:
    """The quickest FP16 attention of others at this size."""
    found = [t for t in timings if t.cache == "FP16 contiguous" and (t.batch, t.length) == (batch, length)]
    return min(found, key=lambda timing: timing.median)


def graph_times(call: Callable[[int], object], layers: int, repeats: int) -> tuple[float, float, float]:
    """Median, least and most microseconds of ``call(layer)``, over replays of a graph of all ``layers``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be filling the caches
    with torch.cuda.stream(stream):
        for layer in range(layers):
            call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    counted = times[3:]
    return statistics.median(counted), min(counted), max(counted)


@dataclass(frozen=True)
class _Case:
    batch: int
    length: int
    kv_heads: int
    query_heads: int
    head_dim: int
    repeats: int
    seed: int
    ceiling: float
    device: str

    def peers(self) -> Iterator[KernelTiming]:
        """FP16 attention of others on contiguous caches, query heads of a KV head as rows of one product or not."""
        heads, group = self.kv_heads, self.query_heads // self.kv_heads
        read = 4.0 * self.batch * heads * self.length * self.head_dim
        layers = self._layers(read)
        shape = (layers, self.batch, heads, self.length, self.head_dim)
        key, value = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2))
        packed = torch.randn(self.batch, heads, group, self.head_dim, dtype=torch.float16, device="cuda")
        single = packed.reshape(self.batch, heads * group, 1, self.head_dim)
        attention = torch.nn.functional.scaled_dot_product_attention
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            for form, call in (
                ("packed heads", lambda i: attention(packed, key[i], value[i])),
                ("grouped heads", lambda i: attention(single, key[i], value[i], enable_gqa=True)),
            ):
                try:
                    with sdpa_kernel(backend):
                        times = graph_times(call, layers, self.repeats)
                except RuntimeError:
                    continue  # a backend that this build or device lacks
                yield self._row(f"{name}, {form}", "FP16 contiguous", False, times, read)
        if importlib.util.find_spec("flashinfer") is not None:
            times = graph_times(_flashinfer(packed.flatten(1, 2), key, value), layers, self.repeats)
            yield self._row("flashinfer", "FP16 contiguous", False, times, read)

    def paged(self, name: str, *, triton_too: bool) -> Iterator[KernelTiming]:
        """One mix through our kernels."""
        layouts = layouts_of(name, self.head_dim)
        counts = [round(share * self.length) for share in MIXES[name][1]]
        codes = sum(n * (own.token_bytes - 8) for n, own in zip(counts, layouts, strict=True))
        layers = self._layers(self.batch * self.kv_heads * codes)
        lengths = torch.tensor(counts, dtype=torch.int32, device="cuda")
        view = random_view(layouts, lengths.expand(self.batch, layers, self.kv_heads, -1).contiguous(), seed=self.seed)
        query = torch.randn(self.batch, self.query_heads, self.head_dim, dtype=torch.float16, device="cuda")
        requests = torch.arange(self.batch, dtype=torch.int32, device="cuda")
        for kernel in ("cuda", "triton") if triton_too else ("cuda",):
            for scores in (True, False):
                read = self.batch * self.kv_heads * (codes + (8 * sum(counts) if scores else 0))
                times = graph_times(
                    lambda layer, kernel=kernel, scores=scores: paged_ops.decode_attention(
                        view, query, layer=layer, requests=requests, scale=self.head_dim**-0.5, update_scores=scores,
                        max_tokens=self.length, kernel=kernel,
                    ), layers, self.repeats,
                )  # fmt: skip
                yield self._row(kernel, name, scores, times, read)

    def _layers(self, read: float) -> int:
        """As many as make the caches cold, two at least."""
        return max(2, -(-int(_COLD_BYTES) // int(read)))

    def _row(self, kernel: str, cache: str, scores: bool, times: tuple[float, ...], read: float) -> KernelTiming:
        return KernelTiming(
            kernel, cache, self.batch, self.length, scores, *times, self.repeats, read, self.ceiling, self.device
        )


def _flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Callable[[int], Tensor]:
    """FlashInfer's paged decode on the same caches, 16 tokens a page, with tensor cores."""
    import flashinfer

    _, batch, heads, length, head_dim = key.shape
    pages = [
        torch.stack([own.transpose(1, 2).reshape(batch * length // 16, 16, heads, head_dim) for own in (k, v)], dim=1)
        for k, v in zip(key, value, strict=True)
    ]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    per_request = length // 16
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * per_request
    indices = torch.arange(batch * per_request, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), 16, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, query.shape[1], heads, head_dim, 16, q_data_type=query.dtype)
    return lambda layer: wrapper.run(query, pages[layer])
