"""Run one engine over several processes of this machine, each with its share of heads and pages (DiffKV Figure 7)."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    device = device or ("cuda" if torch.cuda.device_count() >= workers else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        given = (workers, folder, model, [list(prompt) for prompt in prompts], params, cache, device, options)
        if workers == 1:
            return [_answers(Shards(), *given[2:])]
        mp.spawn(_worker, given, nprocs=workers)
        return [_read(Path(folder) / f"{rank}.json") for rank in range(workers)]


def _worker(rank: int, workers: int, folder: str, *given: Any) -> None:
    on_gpu = given[4] == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers
    )
    try:
        answers = json.dumps(asdict(_answers(Shards.join(), *given)))
        (Path(folder) / f"{rank}.json").write_text(answers, encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _answers(
    shards: Shards, model: str, prompts: list[list[int]], params: SamplingParams, cache: Cache, device: str,
    options: dict[str, Any],
) -> WorkerResult:  # fmt: skip
    own = f"cuda:{shards.rank}" if device == "cuda" else device
    positions = options.get("max_tokens", 2048)
    weights = Weights.of_model(load_model(model, device=own), max_positions=positions, shards=shards)
    llm = LLM(weights, cache, **options)
    memory, last, held = llm.cache.memory, {}, []
    for output in llm.stream(prompts, params):
        last[output.number] = output
        held.append(len(memory.free) - memory.synchronize_counts())
    outputs = [last[number] for number in sorted(last)]
    return WorkerResult(shards.rank, outputs, llm.cache.kv_heads, held, memory.layouts[0].page_bytes)


def _read(path: Path) -> WorkerResult:
    found = json.loads(path.read_text(encoding="utf-8"))
    outputs = found.pop("outputs")
    for own in outputs:
        own["tokens"], own["token_times"] = tuple(own["tokens"]), tuple(own["token_times"])
    return WorkerResult(outputs=[RequestOutput(**own) for own in outputs], **found)
