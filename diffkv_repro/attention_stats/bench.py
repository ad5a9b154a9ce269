"""What collecting statistics costs, against a plain prefill: ``diffkv-repro bench stats``.

As a module (``python -m diffkv_repro.attention_stats.bench MODEL TOKENS [DEVICE]``) it prints the peak memory of one
collection in a fresh process: within one process the allocator keeps what an earlier length used.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from diffkv_repro.attention_stats.collect import collect
from diffkv_repro.core.timing import PairedTimes, peak_memory, time_pairs
from diffkv_repro.models import SHAPES, load_model
from diffkv_repro.models.hf import decoder_of
from diffkv_repro.models.shaped import random_model, shaped_config
from diffkv_repro.models.weights import PACKAGED
from diffkv_repro.models.zoo import default_dtype

# glibc otherwise keeps freed blocks of up to 32 MB, and how many depends on what was allocated before: the
# same collection then measures 20 to 140 MiB at 1,024 tokens.
_PROMPT_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class TimeCost:
    """Seconds of a collection and of a plain prefill of as many tokens, pair by pair."""

    model: str
    tokens: int
    times: PairedTimes

    def summary(self) -> str:
        """One line for people."""
        low, high = self.times.spread
        return (
            f"{self.model}, {self.tokens} tokens: statistics take {self.times.ratio:.2f} x a plain prefill "
            f"(median of {len(self.times.call)}, {low:.2f} to {high:.2f})"
        )


@dataclass(frozen=True)
class MemoryCost:
    """Peak bytes above the loaded model at two lengths, each in a fresh process."""

    model: str
    lengths: tuple[int, int]
    peaks: tuple[int, int]

    @property
    def growth_over_linear(self) -> float:
        """Peak at the longer length over the peak at the shorter one scaled by the lengths; 1 is linear."""
        (short, long), (low, high) = self.lengths, self.peaks
        return high / (low * long / short)

    def summary(self) -> str:
        """One line for people."""
        (short, long), (low, high) = self.lengths, self.peaks
        return (
            f"{self.model}: peak memory {low / 2**20:.0f} MiB at {short} tokens, {high / 2**20:.0f} MiB at {long}: "
            f"{self.growth_over_linear:.2f} x the linear prediction"
        )


def require_context(name: str, lengths: Sequence[int]) -> None:
    """Raise ValueError, before anything is measured, for a length beyond the model's context."""
    limit = _max_positions(name)
    if limit is not None and max(lengths) > limit:
        raise ValueError(f"{max(lengths)} tokens are more than the context of {name}, {limit}")


def bench_time(name: str, *, tokens: int, repeats: int, device: str | None = None) -> TimeCost:
    """Time collections against plain prefills of random tokens, in turn, after one uncounted pair."""
    model = _load(name, device)
    ids = _random_ids(model, tokens)

    def plain() -> None:
        with torch.inference_mode():
            decoder_of(model)(input_ids=ids, use_cache=False)

    return TimeCost(name, tokens, time_pairs(lambda: collect(model, ids), plain, repeats))


def bench_memory(name: str, *, short: int, long: int, device: str | None = None) -> MemoryCost:
    """Peak memory of a collection at two lengths, freed blocks given back at once."""
    return MemoryCost(name, (short, long), (_peak_in_child(name, short, device), _peak_in_child(name, long, device)))


def _peak_in_child(name: str, tokens: int, device: str | None) -> int:
    command = [
        sys.executable,
        "-m",
        "diffkv_repro.attention_stats.bench",
        name,
        str(tokens),
        *([device] if device else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _PROMPT_ALLOCATOR)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {tokens} tokens failed: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])["growth"]


def _max_positions(name: str) -> int | None:
    if name in SHAPES and name not in PACKAGED:
        return shaped_config(SHAPES[name]).max_position_embeddings
    return load_model(name).layout.max_positions


def _load(name: str, device: str | None) -> PreTrainedModel:
    """A real model, or random weights where ``name`` is a shape of a paper's model."""
    if name in SHAPES and name not in PACKAGED:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return random_model(SHAPES[name], device=device, dtype=default_dtype(device))
    return load_model(name, device=device).model


def _random_ids(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, tokens), generator=generator).to(model.device)


def _child(name: str, tokens: int, device: str | None = None) -> None:
    model = _load(name, device)
    # What the libraries set up on first use, and weights mapped from disk, are not the method's.
    collect(model, _random_ids(model, 16))
    for weight in model.parameters():
        weight.sum()
    with peak_memory(model.device.type) as seen:
        collect(model, _random_ids(model, tokens))
    sys.stdout.write(json.dumps({"growth": seen.growth}) + "\n")


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
