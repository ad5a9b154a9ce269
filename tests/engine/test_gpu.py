"""The engine on a GPU: captured steps give the tokens of steps that are not captured, and those of transformers."""

import pytest
import torch
from cache_helpers import ids_of
from tiny import save, tiny_llama

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, TierReplay, Weights
from diffkv_repro.engine.measure.load import steady_state
from diffkv_repro.engine.measure.steps import generation_step
from diffkv_repro.engine.runner import StepInputs
from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.zoo import load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
POLICY = CompressionPolicy.released(alpha_high=1.5, alpha_low=0.5, window=5)
SHAPE = ModelShape(
    "small", "", layers=4, hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=128, vocab=1000
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = save(tiny_llama(heads=4, kv_heads=2, head_dim=64), tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), device="cuda", dtype=torch.float16)


@pytest.mark.parametrize("cache", ["fp16", "fp16-per-query-head", POLICY], ids=["fp16", "per query head", "policy"])
def test_captured_steps_give_the_tokens_of_eager_ones(loaded, cache):
    prompts = [ids_of(length, seed=length)[0].tolist() for length in (9, 30, 1, 17)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    graphs, eager = (
        LLM(loaded, cache, max_requests=4, max_tokens=64, graphs=captured).generate(prompts, params)
        for captured in (True, False)
    )
    assert [output.tokens for output in graphs] == [output.tokens for output in eager]


def test_fp16_gives_the_tokens_of_transformers(loaded):
    prompt = ids_of(20, seed=3)
    (output,) = LLM(loaded, max_requests=2, max_tokens=64).generate(
        prompt.tolist(), SamplingParams(max_tokens=16, ignore_eos=True)
    )
    expected = loaded.model.generate(prompt.cuda(), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    same = sum(a == b for a, b in zip(output.tokens, expected[0, 20:].tolist(), strict=True))
    assert same >= 15, "half precision may tip one close choice, and a text seldom returns after it"


@pytest.mark.parametrize("cache", ["fp16", POLICY], ids=["fp16", "policy"])
def test_a_measured_step_leaves_the_engine_empty_and_a_steady_state_is_reached(cache):
    weights = Weights.random(SHAPE, max_positions=512, device="cuda", dtype=torch.float16)
    replay = None if cache == "fp16" else TierReplay.even([0.3, 0.6], 4, 2, "cuda")
    llm = LLM(weights, cache, max_requests=8, max_tokens=512, replay=replay)
    timing = generation_step(llm, 8, 300, repeats=4)
    assert 0 < timing.management < timing.total
    assert llm.cache.memory.synchronize_counts() == len(llm.cache.memory.free)
    found = steady_state(llm, prompt=40, generated=200, steps=40)
    assert found.tokens >= found.steps
    assert found.mean_batch <= 8


def test_a_step_does_not_wait_for_the_device(loaded):
    llm = LLM(loaded, POLICY, max_requests=2, max_tokens=64)
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
    # Rows of no request: the same launches, and they may not write anywhere.
    inputs = StepInputs(2, 2, llm.runner.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm.runner.decoder.step(*inputs.arguments(), 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_the_device_holds_what_the_account_says():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    shape = ModelShape(
        "mid", "", layers=8, hidden=2048, intermediate=8192, heads=16, kv_heads=8, head_dim=128, vocab=32000
    )
    weights = Weights.random(shape, max_positions=512, device="cuda", dtype=torch.float16)
    llm = LLM(weights, "fp16", max_requests=16, max_tokens=512, pool_bytes=2 * 10**9)
    generation_step(llm, 16, 300, repeats=2)
    accounted = weights.nbytes + llm.cache.memory.allocated_bytes
    assert accounted <= torch.cuda.max_memory_allocated() - before <= 1.03 * accounted
