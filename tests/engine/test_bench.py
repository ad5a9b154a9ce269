import random

import pytest
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, TierReplay, Weights
from diffkv_repro.engine.measure.cost import (
    CacheTraffic,
    Machine,
    end_to_end_speedup,
    requests_in,
    step_bytes,
    step_seconds,
    weight_bytes,
)
from diffkv_repro.engine.measure.load import serve_poisson, steady_state
from diffkv_repro.engine.measure.steps import fast_forward, generation_step, prompt_step
from diffkv_repro.models.shapes import ModelShape, shape_of

SHAPE = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
POLICY = CompressionPolicy.paper(group_max="each-step", window=8)


def llm_of(cache="fp16", **options):
    weights = Weights.random(SHAPE, max_positions=256, device="cpu", dtype=torch.float32)
    replay = TierReplay.even([0.3, 0.6], 2, 2, "cpu") if isinstance(cache, CompressionPolicy) else None
    return LLM(weights, cache, replay=replay, **({"max_requests": 4, "max_tokens": 256} | options))


@pytest.mark.parametrize("cache", ["fp16", POLICY], ids=["fp16", "policy"])
def test_a_step_is_the_sum_of_its_parts_and_leaves_the_engine_empty(cache):
    llm = llm_of(cache)
    for timing in (generation_step(llm, 3, 60, repeats=2), prompt_step(llm, 3, 20, repeats=2)):
        assert (timing.batch, timing.repeats) == (3, 2)
        assert 0 < timing.management < timing.total
        assert sum(timing.shares().values()) == pytest.approx(100, abs=1e-6)
        assert llm.scheduler.idle
        assert llm.cache.memory.synchronize_counts() == len(llm.cache.memory.free)


def test_prompts_that_do_not_fit_one_step_are_refused():
    with pytest.raises(ValueError, match="1 of 3 prompts enter at a time"):
        prompt_step(llm_of(max_batch_tokens=20), 3, 20, repeats=1)


def test_replayed_tiers_have_their_shares_in_both_phases():
    llm = llm_of(POLICY)
    requests = fast_forward(llm, [100, 50])
    lengths = llm.cache.view.lengths[[own.slot for own in requests]]
    assert lengths[0, 0, 0].tolist() == [8 + 27, 55]
    entered = llm.add([1] * 200, SamplingParams(max_tokens=50))
    for _ in range(40):
        llm.step()
    request = next(own for own in llm.scheduler.running if own.number == entered)
    kept = llm.cache.view.lengths[request.slot].float().mean(dim=(0, 1)) / (request.cached - 8)
    assert kept[0] - 8 / (request.cached - 8) == pytest.approx(0.3, abs=0.07)
    assert kept[1] == pytest.approx(0.6, abs=0.07)


def test_replays_are_checked_and_spread():
    with pytest.raises(ValueError, match="a sum of at most 1"):
        TierReplay(torch.full((1, 1, 2), 0.6), "x")
    weights = Weights.random(SHAPE, max_positions=64, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"shares are \[1, 2, 2\]; the cache has \[2, 2, 2\]"):
        LLM(weights, POLICY, replay=TierReplay.even([0.3, 0.6], 1, 2, "cpu"), max_tokens=64)
    with pytest.raises(ValueError, match="needs a policy"):
        LLM(weights, "fp16", replay=TierReplay.even([1.0], 2, 2, "cpu"), max_tokens=64)
    recorded = TierReplay(torch.rand(3, 2, 2) / 2, "a model")
    wider = recorded.spread(5, 4, "cpu")
    assert wider.shares.shape == (5, 4, 2)
    assert set(wider.shares.flatten().tolist()) <= set(recorded.shares.flatten().tolist())


def test_a_smaller_cache_holds_more_requests_in_a_steady_state():
    pool = 100_000
    plain = steady_state(llm_of(pool_bytes=pool, max_requests=16), prompt=20, generated=100, steps=30)
    small = steady_state(llm_of(Precision(4, 2), pool_bytes=pool, max_requests=16), prompt=20, generated=100, steps=30)
    assert small.mean_batch > 1.5 * plain.mean_batch
    for found in (plain, small):
        assert found.tokens >= found.steps
        assert found.per_second > 0
    with pytest.raises(ValueError, match="the pool holds no request"):
        steady_state(llm_of(pool_bytes=20_000, max_requests=2), prompt=150, generated=100, steps=2)


def test_poisson_arrivals_are_all_answered_below_the_knee_and_not_above():
    def lengths(draw: random.Random) -> tuple[int, int]:
        return draw.randint(3, 10), draw.randint(2, 5)

    served = serve_poisson(llm_of(), rate=200.0, requests=12, lengths=lengths, seed=1)
    assert (served.answered, served.offered) == (12, 12)
    assert 0 < served.mean <= served.tail(1.0)
    assert served.tail(0.5) <= served.tail(0.95)
    hurried = serve_poisson(llm_of(), rate=1e6, requests=400, lengths=lengths, limit=0.2)
    assert hurried.answered < 400
    with pytest.raises(ValueError, match="rate is 0"):
        serve_poisson(llm_of(), rate=0, requests=1, lengths=lengths)


def test_bytes_of_a_step():
    shape = shape_of("llama3-8b")
    assert weight_bytes(shape) == pytest.approx(2 * (shape.parameters - 128256 * 4096))
    assert CacheTraffic.fp16().token_bytes(128) == 512
    assert CacheTraffic.fp16(readers=4).token_bytes(128) == 2048
    mix = CacheTraffic((Precision(8, 4), Precision(4, 2)), (0.3, 0.6))
    assert mix.token_bytes(128) == pytest.approx(0.3 * 200 + 0.6 * 104 + 0.9 * 8)
    lengths = [4096] * 8
    plain = step_bytes(shape, CacheTraffic.fp16(), lengths)
    assert plain == weight_bytes(shape) + 8 * 4096 * shape.kv_bytes_per_token()
    assert step_bytes(shape, CacheTraffic.fp16(), lengths, workers=2) == plain / 2
    machine = Machine(bandwidth=4e12, overhead=1e-3)
    assert step_seconds(shape, mix, lengths, machine) == pytest.approx(step_bytes(shape, mix, lengths) / 4e12 + 1e-3)
    once, each = (end_to_end_speedup(shape, mix, 8, 4096, readers=readers) for readers in (1, 4))
    assert 1.06 < once < 1.25 < each
    stored = 2 * 128 * 2
    assert requests_in(2 * shape.kv_bytes_per_token() * 100, shape, stored, 100) == pytest.approx(2)
    for wrong in ({"shares": (1.2,)}, {"shares": (0.5, 0.5)}, {"shares": (1.0,), "readers": 0}):
        with pytest.raises(ValueError):
            CacheTraffic((Precision(8, 4),), **wrong)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        Machine(0)
