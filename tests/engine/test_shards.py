"""Two workers, each with half the heads and pages of its own, give the tokens of one (DiffKV Figure 7)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cache_helpers import ids_of
from tiny import save, tiny_qwen2

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, Shards, Weights
from diffkv_repro.models.zoo import load_model

POLICY = CompressionPolicy.paper(alpha_high=1.5, alpha_low=0.5, window=5, group_max="each-step")
WORKER = """
import json, sys
import torch.distributed as dist
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, Shards, Weights
from diffkv_repro.models.zoo import load_model
folder, rank, meeting, cache, prompts, pool, out = json.loads(sys.argv[1])
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
weights = Weights.of_model(load_model(folder, device="cpu"), max_positions=64, shards=Shards.join())
cache = cache if cache == "fp16" else CompressionPolicy.from_dict(cache)
llm = LLM(weights, cache, max_requests=3, max_tokens=64, pool_bytes=pool)
outputs = llm.generate(prompts, SamplingParams(max_tokens=12))
held = llm.cache.memory.pool.nbytes
json.dump({"tokens": [o.tokens for o in outputs], "held": held, "preempted": sum(o.preemptions for o in outputs)},
          open(f"{out}/{rank}.json", "w"))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("cache", ["fp16", POLICY], ids=["fp16", "policy"])
def test_two_workers_give_the_tokens_of_one(cache, tmp_path):
    folder = save(tiny_qwen2(heads=4, kv_heads=2), tmp_path / "model")
    prompts = [ids_of(length, seed=length)[0].tolist() for length in (9, 30, 1, 14)]
    weights = Weights.of_model(load_model(str(folder), device="cpu"), max_positions=64)
    alone = LLM(weights, cache, max_requests=3, max_tokens=64)
    expected = [output.tokens for output in alone.generate(prompts, SamplingParams(max_tokens=12))]
    given = cache if cache == "fp16" else json.loads(policy_text(cache, tmp_path))
    common = [str(folder), 0, f"file://{tmp_path}/meeting", given, prompts, None, str(tmp_path)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps([common[0], rank, *common[2:]])], stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    errors = [worker.communicate(timeout=300)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for own in found:
        assert [tuple(tokens) for tokens in own["tokens"]] == expected
    assert (
        abs(sum(own["held"] for own in found) - alone.cache.memory.pool.nbytes) <= 2 * alone.cache.layouts[0].page_bytes
    )


def policy_text(policy, folder) -> str:
    path = Path(folder) / "policy.json"
    policy.save(path)
    return path.read_text()


def test_heads_that_cannot_be_split_are_refused(tmp_path):
    loaded = load_model(str(save(tiny_qwen2(heads=6, kv_heads=3), tmp_path)), device="cpu")
    with pytest.raises(ValueError, match="3 KV heads cannot be split over 2 workers"):
        Weights.of_model(loaded, max_positions=8, shards=Shards(0, 2, object(), object()))
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        Shards(2, 2)
    with pytest.raises(ValueError, match="2 workers need process groups"):
        Shards(0, 2)
