"""Run one engine over several processes of this machine, each with its share of heads and pages (DiffKV Figure 7)."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from diffkv_repro.engine.kv_cache import Cache
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.request import RequestOutput, SamplingParams
from diffkv_repro.engine.shards import Shards
from diffkv_repro.engine.weights import Weights
from diffkv_repro.models.zoo import load_model


@dataclass(frozen=True)
class WorkerResult:
    """What a worker answers: its ``outputs`` are every worker's; ``heads`` KV heads are its own, and so are the pages
    of ``page_bytes`` that it had ``held`` at each token that came."""

    rank: int
    outputs: list[RequestOutput]
    heads: int
    held: list[int]
    page_bytes: int


def generate_sharded(
    model: str, prompts: Sequence[Sequence[int]], params: SamplingParams, *, workers: int, cache: Cache = "fp16",
    device: str | None = None, **options: Any,
) -> list[WorkerResult]:  # fmt: skip
    """Answer token ``prompts`` with the model that ``load_model`` knows as ``model`` on ``workers`` processes.

    On GPUs worker i takes device i, and sums go through NCCL; on CPUs through gloo. ``options`` are those of
    :class:`LLM`. Raises what a worker raises.
    """
    asked = [list(prompt) for prompt in prompts]
    return [_result(own) for own in spread(_answers, workers, device, model, asked, params, cache, options)]


def spread(call: Callable[..., dict[str, Any]], workers: int, device: str | None, *given: Any) -> list[dict[str, Any]]:
    """``call(shards, device, *given)`` in each worker; what they return, in order."""
    device = device or ("cuda" if torch.cuda.device_count() >= workers else "cpu")
    if workers == 1:
        return [call(Shards(), device, *given)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (workers, folder, call, device, *given), nprocs=workers)
        texts = [(Path(folder) / f"{rank}.json").read_text(encoding="utf-8") for rank in range(workers)]
    return [json.loads(text) for text in texts]


def _worker(
    rank: int, workers: int, folder: str, call: Callable[..., dict[str, Any]], device: str, *given: Any
) -> None:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers
    )
    try:
        found = json.dumps(call(Shards.join(), f"cuda:{rank}" if on_gpu else device, *given))
        (Path(folder) / f"{rank}.json").write_text(found, encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _answers(
    shards: Shards, device: str, model: str, prompts: list[list[int]], params: SamplingParams, cache: Cache,
    options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    positions = options.get("max_tokens", 2048)
    weights = Weights.of_model(load_model(model, device=device), max_positions=positions, shards=shards)
    llm = LLM(weights, cache, **options)
    memory, last, held = llm.cache.memory, {}, []
    for output in llm.stream(prompts, params):
        last[output.number] = output
        held.append(memory.pages_in_use())
    ended = (last[number] for number in sorted(last))
    outputs = [replace(own, tokens=list(own.tokens), token_times=list(own.token_times)) for own in ended]
    return asdict(WorkerResult(shards.rank, outputs, llm.cache.kv_heads, held, memory.layouts[0].page_bytes))


def _result(found: dict[str, Any]) -> WorkerResult:
    outputs = [RequestOutput(**own) for own in found["outputs"]]
    return WorkerResult(**found | {"outputs": outputs})
