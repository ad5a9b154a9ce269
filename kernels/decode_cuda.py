"""Decode attention in CUDA C++ (``decode_attention.cu``): the quick path on NVIDIA GPUs of compute capability 8.0 on.

It covers one scale group a vector, head sizes 64, 128 and 256, one or two tiers, and up to 8 query heads a KV head;
:func:`unsupported` says why another shape has to take the Triton kernel.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from diffkv_repro.kernels.nvrtc import Function, available, compile_cubin
from torch import Tensor

_RESERVED = 1024  # bytes of shared memory that CUDA keeps of each block
# Measured on an H200, over 350 pairs of a size and a configuration: what a round of blocks costs beside its tokens, in
# tokens of one multiprocessor; how many steps on their way to a multiprocessor hide the latency of memory, and how
# much slower fewer are. The configurations (warps, stages, blocks a multiprocessor) are those that won somewhere.
_ROUND_COST, _STEPS_ON_THEIR_WAY, _SLOWER = 200, 18, 0.2
_CONFIGURATIONS = ((4, 2, 4), (4, 3, 3), (8, 2, 2), (4, 2, 3))
_LARGE_HEADS = ((4, 2, 2), (4, 2, 1))  # head_dim above 128
_SOURCES = ("decode_attention.cu", "decode_step.cuh", "cluster.cuh", "mma_fields.cuh")
_LOG2_E = 1.4426950408889634


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "tables", "lengths", "requests", "query", "out", "newest")),
        *((name, ctypes.c_int64) for name in ("table_request", "table_head", "length_request", "length_head")),
        *((name, ctypes.c_int64) for name in ("query_row", "out_row")),
        ("scale", ctypes.c_float), ("entries", ctypes.c_int),
        ("steps_per_warp", ctypes.c_int), ("waiting_per_warp", ctypes.c_int),
    ]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for; ``tiers`` are (key bits, value bits, tokens a page, offsets of key scales, value
    codes, value scales and scores, units of 16 tokens a step)."""

    head_dim: int
    group: int
    page_bytes: int
    tiers: tuple[tuple[int, ...], ...]
    update_scores: bool
    bfloat16: bool
    cluster: int
    warps: int = 4
    stages: int = 2
    blocks_per_sm: int = 3

    @classmethod
    def of(cls, layouts, *, group: int, **options) -> "Shape":
        """The shape of ``PageLayout`` s and ``group`` query heads a KV head."""
        tiers = tuple(
            (own.precision.key_bits, own.precision.value_bits, own.tokens, *own.offsets[1:5], _units(own))
            for own in layouts
        )
        return cls(layouts[0].head_dim, group, layouts[0].page_bytes, tiers, **options)

    def defines(self) -> dict[str, int]:
        """Preprocessor symbols of ``decode_attention.cu``."""
        names = ("K_BITS", "V_BITS", "TOKENS", "K_SCALES", "VALUES", "V_SCALES", "SCORES", "UNITS")
        tiers = {f"{name}_{i}": own[at] for i, own in enumerate(self.tiers) for at, name in enumerate(names)}
        return {
            "HEAD_DIM": self.head_dim, "GROUP": self.group, "PAGE_BYTES": self.page_bytes, "TIERS": len(self.tiers),
            "WARPS": self.warps, "STAGES": self.stages, "CLUSTER": self.cluster, "BLOCKS_PER_SM": self.blocks_per_sm,
            "UPDATE_SCORES": int(self.update_scores), "BFLOAT16": int(self.bfloat16), **tiers,
        }  # fmt: skip

    def ring_bytes(self) -> int:
        """Shared memory for steps on their way, or for partial results after; as RING in the kernel."""
        stage = max(16 * own[7] * (self.head_dim * (own[0] + own[1]) // 8 + 8) for own in self.tiers)
        merge = (self.warps * (self.head_dim + 16) + self.head_dim) * self.group * 4
        return max(self.warps * self.stages * stage, merge + 127) // 128 * 128

    def steps_per_warp(self, max_tokens: int) -> int:
        """Most steps that a warp can meet when the tiers of a head hold ``max_tokens`` together."""
        return self._per_warp(max_tokens, [1] * len(self.tiers))

    def waiting_per_warp(self, max_tokens: int) -> int:
        """Bytes for the probabilities of these steps, until the softmax is known."""
        if not self.update_scores:
            return 0
        return self._per_warp(max_tokens, [(64 * own[7] + 8) * ((self.group + 1) // 2) for own in self.tiers])

    def _per_warp(self, max_tokens: int, costs: list[int]) -> int:
        # A tier's steps are at most its tokens times steps a token, and one; a warp's at most its share, and one.
        densest = max(cost * -(-own[2] // (16 * own[7])) / own[2] for cost, own in zip(costs, self.tiers, strict=True))
        return -(-(math.ceil(max_tokens * densest / (self.warps * self.cluster)) + 2 * sum(costs)) // 8) * 8

    def shared_bytes(self, max_tokens: int) -> int:
        """Dynamic shared memory of a block."""
        own = 8 * self.steps_per_warp(max_tokens) + self.waiting_per_warp(max_tokens)
        return self.ring_bytes() + self.warps * own

    def static_bytes(self) -> int:
        """Shared memory that the kernel declares itself."""
        own = self.group * self.head_dim * 2 + (3 * self.warps + 6) * 4 * 8 + 8
        return -(-own // 128) * 128


def _units(layout) -> int:
    """Light steps of 32 tokens, heavy ones of 16: what is on its way should not crowd out what waits."""
    return 2 if layout.precision.key_bits + layout.precision.value_bits <= 8 else 1


def unsupported(layouts, *, group: int) -> str:
    """Why this kernel cannot serve ``layouts`` with ``group`` query heads a KV head; empty when it can."""
    head_dim = layouts[0].head_dim
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim} is not 64, 128 or 256"
    if not 1 <= group <= 8:
        return f"{group} query heads a KV head are not 1 to 8"
    if len(layouts) > 2:
        return f"{len(layouts)} tiers are more than 2"
    for own in layouts:
        if own.precision.key_groups > 1 or own.precision.value_groups > 1:
            return f"{own.precision} has several scale groups a vector"
        if min(own.precision.key_bits, own.precision.value_bits) * head_dim < 128:
            return f"{own.precision} at head_dim {head_dim} has rows of less than 16 bytes"
    return ""


def compile_shape(shape: Shape, arch: str) -> bytes:
    """Machine code of the kernel for ``arch``, as ``sm_90``; clusters need that or a later one."""
    source, *headers = (files("diffkv_repro.kernels").joinpath(name).read_text(encoding="utf-8") for name in _SOURCES)
    named = dict(zip(_SOURCES[1:], headers, strict=True))
    return compile_cubin(source, shape.defines(), arch, named)


@cache
def _load(shape: Shape, shared: int, device: int) -> Function:
    major, minor = torch.cuda.get_device_capability(device)
    return Function(compile_shape(shape, f"sm_{major}{minor}"), "decode_attention", shared)


@cache
def plan(
    layouts, group: int, work: int, max_tokens: int, update_scores: bool, bfloat16: bool, device: int
) -> Shape | None:
    """The kernel for ``work`` (requests times KV heads) of up to ``max_tokens`` tokens; None where none can take them.

    Blocks of equal work run in rounds of as many as fit on the device. Of the configurations and of the clusters that
    share a sequence, the pair with the least estimated time is taken, among those whose probabilities fit in shared
    memory: the last round should not leave multiprocessors idle, nor should too few bytes be on their way at a time.
    """
    properties = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_multiprocessor
    best: tuple[float, Shape] | None = None
    for cluster in range(1, 9) if properties.major >= 9 else (1,):
        for warps, stages, blocks in (*_CONFIGURATIONS, *_LARGE_HEADS) if layouts[0].head_dim <= 128 else _LARGE_HEADS:
            shape = Shape.of(
                layouts, group=group, update_scores=update_scores, bfloat16=bfloat16, cluster=cluster, warps=warps,
                stages=stages, blocks_per_sm=blocks,
            )  # fmt: skip
            if shape.shared_bytes(max_tokens) + shape.static_bytes() + _RESERVED <= room // blocks:
                rounds = math.ceil(work * cluster / (properties.multi_processor_count * blocks))
                slower = max(1.0, _STEPS_ON_THEIR_WAY / (blocks * warps * (stages - 1))) ** _SLOWER
                time = rounds * (max_tokens / cluster * blocks * slower + _ROUND_COST)
                if best is None or time < best[0]:
                    best = time, shape
    return best and best[1]


def refusal(view, query: Tensor, max_tokens: int, update_scores: bool, out: Tensor | None = None) -> str:
    """Why :func:`decode_attention_cuda` cannot serve this cache and query here, where the Triton kernel can; or ""."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"queries of {query.dtype}"
    if out is not None and out.dtype != query.dtype:
        return f"an output of {out.dtype} from queries of {query.dtype}"
    if not available():
        return "NVRTC was not found"
    group = query.shape[1] // view.kv_heads
    if reason := unsupported(view.layouts, group=group):
        return reason
    if _planned(view, query, max_tokens, update_scores) is None:
        return f"{max_tokens} tokens a head at {group} query heads a KV head do not fit in shared memory"
    return ""


def _planned(view, query: Tensor, max_tokens: int, update_scores: bool) -> Shape | None:
    group, work = query.shape[1] // view.kv_heads, query.shape[0] * view.kv_heads
    return plan(view.layouts, group, work, max_tokens, update_scores, query.dtype == torch.bfloat16, query.device.index)


def decode_attention_cuda(
    view, query: Tensor, *, layer: int, requests: Tensor, scale: float, max_tokens: int, update_scores: bool = True,
    newest: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of ``query`` [batch, query_heads, head_dim] (FP16 or BF16) over the pages of ``requests``
    int32 [batch].

    ``max_tokens`` bounds the tokens of a head (all tiers); it fixes the launch, so that a captured graph stays valid
    as lengths grow. With ``update_scores`` each token's score in its page grows by its largest probability over the
    query heads of its KV head, except that of tier-0 slot ``newest`` int32 [batch, kv_heads] (-1: none). Raises
    ValueError for what :func:`refusal` names.
    """
    if reason := refusal(view, query, max_tokens, update_scores, out):
        raise ValueError(reason)
    shape = _planned(view, query, max_tokens, update_scores)
    out = torch.empty_like(query) if out is None else out
    function = _load(shape, shape.shared_bytes(max_tokens), query.device.index)
    tables, lengths = view.tables[0, :, layer], view.lengths[:, layer]
    pointers = (view.pool, tables, lengths, requests.int(), query, out, newest)
    arguments = _Arguments(
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        tables.stride(0), tables.stride(1), lengths.stride(0), lengths.stride(1), query.stride(0), out.stride(0),
        scale * _LOG2_E, tables.shape[-1], shape.steps_per_warp(max_tokens), shape.waiting_per_warp(max_tokens),
    )  # fmt: skip
    stream = torch.cuda.current_stream(query.device).cuda_stream
    function.launch((shape.cluster, view.kv_heads, len(requests)), 32 * shape.warps, stream, arguments)
    return out
