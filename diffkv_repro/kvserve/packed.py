"""Profiles measured here from the ground floor alone: FP8, levels in packed bits, Huffman and bzip2 over levels.

Enough to give the latency model lines of a real machine, from quick and large to slow and small.
"""

import bz2
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.core.packing import pack, unpack
from diffkv_repro.core.quantize import Axis, Quantized, dequantize, quantize
from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.models.hf import AttentionCall, decoder_of, intercept_attention

Coder = Literal["packed", "Huffman", "bzip2"]
_AXES: tuple[Axis, Axis] = ("channel", "token")  # of keys and values, as KVServe's default profile has them


class TimedCodec(Protocol):
    """What :func:`measure` times: FP16 tensors to what is sent and back, and how many bytes that is."""

    @property
    def name(self) -> str: ...

    def encode(self, keys_values: Sequence[Tensor]) -> list[Any]: ...

    def decode(self, sent: Sequence[Any]) -> list[Tensor]: ...

    def sent_bytes(self, sent: Sequence[Any]) -> int: ...


@dataclass(frozen=True)
class Fp8:
    """Every number as an 8-bit float of 5 exponent and 2 mantissa bits."""

    name: str = "FP8"

    def encode(self, keys_values: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(torch.float8_e5m2) for x in keys_values]

    def decode(self, sent: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(torch.float16) for x in sent]

    def sent_bytes(self, sent: Sequence[Tensor]) -> int:
        return sum(x.nbytes for x in sent)


@dataclass(frozen=True)
class Levels:
    """Keys by channel and values by token in 2 to 256 ``levels``, their codes put into bytes by ``coder``."""

    levels: int
    coder: Coder = "packed"

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise ValueError(f"levels is {self.levels}; allowed are 2 to 256")
        if self.coder not in get_args(Coder):
            raise ValueError(f"coder is {self.coder!r}; allowed are {', '.join(get_args(Coder))}")

    @property
    def name(self) -> str:
        """As ``3 levels, bzip2``."""
        return f"{self.levels} levels, {self.coder}"

    @property
    def _bits(self) -> int:
        return (self.levels - 1).bit_length()

    def encode(self, keys_values: Sequence[Tensor]) -> list[tuple[Quantized, bytes]]:
        """Scales and zero points (the codes that stand beside them are not sent), and coded bytes."""
        stored = [quantize(x, self.levels, axis=axis) for x, axis in zip(keys_values, _AXES, strict=True)]
        return [(one, self._bytes(one.codes)) for one in stored]

    def decode(self, sent: Sequence[tuple[Quantized, bytes]]) -> list[Tensor]:
        return [
            dequantize(
                Quantized(self._codes(coded, one.codes.shape), one.scale, one.zero, one.levels, one.axis, one.group),
                torch.float16,
            )
            for one, coded in sent
        ]

    def sent_bytes(self, sent: Sequence[tuple[Quantized, bytes]]) -> int:
        return sum(len(coded) + one.scale.nbytes + one.zero.nbytes for one, coded in sent)

    def _bytes(self, codes: Tensor) -> bytes:
        if self.coder == "packed":
            return pack(codes.flatten(), self._bits).numpy().tobytes()
        if self.coder == "bzip2":  # it finds more in the tokens of one channel than in the channels of a token
            return bz2.compress(codes.transpose(-1, -2).contiguous().numpy().tobytes())
        coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
        return coder.compress(codes.numpy().tobytes()) + coder.flush()

    def _codes(self, coded: bytes, shape: torch.Size) -> Tensor:
        if self.coder == "packed":
            return unpack(_tensor(coded), self._bits, shape.numel()).view(shape)
        if self.coder == "bzip2":
            *lead, tokens, channels = shape
            return _tensor(bz2.decompress(coded)).view(*lead, channels, tokens).transpose(-1, -2).contiguous()
        return _tensor(zlib.decompress(coded)).view(shape)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


CODECS: tuple[TimedCodec, ...] = (
    Fp8(), Levels(16), Levels(4), Levels(16, "Huffman"), Levels(4, "Huffman"), Levels(3, "Huffman"), Levels(3, "bzip2"),
)  # fmt: skip


def keys_and_values(model, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The KV cache of a prompt ``input_ids`` [1, tokens] as FP16 keys and values [layers, kv_heads, tokens, channels].

    Keys are those after RoPE, on the CPU.
    """
    layers: dict[int, AttentionCall] = {}

    def watch(call: AttentionCall) -> Tensor:
        layers[call.layer] = call
        return PromptAttention(call).output()

    with torch.inference_mode(), intercept_attention(model, watch):
        decoder_of(model)(input_ids=input_ids.to(model.device), use_cache=False)
    calls = [layers[index] for index in sorted(layers)]
    keys, values = (torch.cat([getattr(call, name) for call in calls]) for name in ("key", "value"))
    return keys.half().cpu(), values.half().cpu()


def measure(codecs: Sequence[TimedCodec], keys_values: Sequence[Tensor], repeats: int) -> list[MeasuredProfile]:
    """Every codec on FP16 keys and values: true ratio, and the best speeds of ``repeats`` rounds, warm, one thread.

    Codecs take turns, so that a machine that is busy for a while slows all alike, and the best round is the one that
    was disturbed least. No quality is given: that takes a task, and none was run.
    """
    raw_bytes = sum(x.nbytes for x in keys_values)
    times: dict[str, list[tuple[float, float]]] = {codec.name: [] for codec in codecs}
    with one_thread(), torch.inference_mode():
        sent = {codec.name: codec.encode(keys_values) for codec in codecs}
        for codec in [codec for _ in range(repeats) for codec in codecs]:
            encode = _seconds(lambda codec=codec: codec.encode(keys_values))
            decode = _seconds(lambda codec=codec: codec.decode(sent[codec.name]))
            times[codec.name].append((encode, decode))
    profiles = []
    for codec in codecs:
        encode, decode = (raw_bytes / min(taken) for taken in zip(*times[codec.name], strict=True))
        ratio = raw_bytes / codec.sent_bytes(sent[codec.name])
        profiles.append(MeasuredProfile(codec.name, ratio, encode, decode, {}))
    return profiles


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
