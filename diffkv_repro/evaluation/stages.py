"""What a request's stages take on this machine: prefill, decoding, and moving its cache (KVServe, Figures 1 and 4)."""

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from diffkv_repro.core.threads import one_thread
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.models import LoadedModel

_CHUNK = 1 << 14
_BUFFER = 1 << 16


@dataclass(frozen=True)
class Stages:
    """Seconds of ``prefill`` and ``decode`` of a prompt of ``tokens``, medians; ``raw_bytes`` of its 16-bit cache."""

    tokens: int
    prefill: float
    decode: float
    raw_bytes: int

    def share(self, bandwidth: float) -> float:
        """Of the completion time that moving the cache takes, by equation 1; ``bandwidth`` in bytes per second."""
        wire = self.raw_bytes / bandwidth
        return wire / (self.prefill + wire + self.decode)


@torch.inference_mode()
def time_stages(loaded: LoadedModel, ids: Tensor, *, new_tokens: int, repeats: int = 3) -> Stages:
    """Run ``ids`` [1, tokens] and ``new_tokens`` greedy steps with the model's own cache, after an uncounted time."""
    if ids.ndim != 2 or ids.shape[0] != 1 or new_tokens < 1 or repeats < 1:
        raise ValueError(
            f"ids are {tuple(ids.shape)}, new_tokens {new_tokens}, repeats {repeats}; one prompt and at least 1 of each"
        )
    turns = [_turn(loaded, ids.to(loaded.device), new_tokens) for _ in range(repeats + 1)][1:]
    prefill, decode = (statistics.median(column) for column in zip(*turns, strict=True))
    return Stages(ids.shape[1], prefill, decode, KVLayout.of(loaded, torch.float16).raw_bytes(ids.shape[1]))


def _turn(loaded: LoadedModel, ids: Tensor, new_tokens: int) -> tuple[float, float]:
    cache = DynamicCache(config=loaded.model.config)
    with one_thread():
        started = time.perf_counter()
        logits = loaded.model(ids, past_key_values=cache, logits_to_keep=1).logits
        between = time.perf_counter()
        for _ in range(new_tokens):
            logits = loaded.model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
        return between - started, time.perf_counter() - between


def paced_transfer(data: bytes, bandwidth: float) -> float:
    """Seconds from the first byte of ``data`` to the last over TCP on this machine, paced to ``bandwidth`` bytes a
    second by the sender. Raises ValueError for a bandwidth that is not above 0.

    Bare TCP on purpose: equation 1 has no term for the encryption and the credits of ``kvserve.link``.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth} bytes/s; it must be above 0")
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    with server, sender, server.accept()[0] as receiver:
        sending = threading.Thread(target=_send, args=(sender, memoryview(data), bandwidth), daemon=True)
        started = time.perf_counter()
        sending.start()
        left, into = len(data), memoryview(bytearray(_BUFFER))
        while left:
            got = receiver.recv_into(into)
            if not got:
                raise ConnectionError(f"the sender stopped {left} bytes before the end")
            left -= got
        seconds = time.perf_counter() - started
        sending.join()
    return seconds


def _send(sender: socket.socket, data: memoryview, bandwidth: float) -> None:
    shaper, started = Shaper(bandwidth), time.monotonic()
    for start in range(0, len(data), _CHUNK):
        piece = data[start : start + _CHUNK]
        time.sleep(max(0.0, shaper.reserve(len(piece), started) - time.monotonic()))
        sender.sendall(piece)


@dataclass(frozen=True)
class Sent:
    """A cache moved once: seconds to encode, on the wire, to decode, and of them all."""

    encode: float
    wire: float
    decode: float

    @property
    def total(self) -> float:
        return self.encode + self.wire + self.decode


def send(profile: Profile, kv: KV, layout: KVLayout, bandwidth: float, *, assets: Assets | None = None) -> Sent:
    """Encode ``kv``, send its frame over a paced link and decode it, one after the other as equation 1 adds them."""
    with one_thread():
        started = time.perf_counter()
        data = profile.encode(kv, layout, assets=assets).to_bytes()
        encoded = time.perf_counter() - started
        wire = paced_transfer(data, bandwidth)
        started = time.perf_counter()
        Frame.from_bytes(data, layout, assets=assets).decode()
        return Sent(encoded, wire, time.perf_counter() - started)


def equation_error(model: MeasuredProfile, raw_bytes: int, bandwidth: float, sent: Sequence[Sent]) -> float:
    """Relative error of equation 1 against the median of measured times."""
    measured = statistics.median(one.total for one in sent)
    return abs(raw_bytes * model.seconds_per_byte(bandwidth) - measured) / measured
