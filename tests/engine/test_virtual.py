"""Virtual time: the pages and the order of requests are those of a real run, whatever the model says."""

import pytest
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, TierReplay, Weights
from diffkv_repro.engine.measure.load import serve_poisson, steady_state, uniform_lengths
from diffkv_repro.engine.measure.virtual import StepCosts, VirtualClock, virtual_time
from diffkv_repro.engine.request import Part
from diffkv_repro.models.shapes import ModelShape

SHAPE = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
POLICY = CompressionPolicy.paper(group_max="each-step", window=8)
COSTS = StepCosts((1, 4), (0.01, 0.02), (1e-5, 1e-5), 0.005, 1e-4)


def llm_of(cache="fp16", **options):
    weights = Weights.random(SHAPE, max_positions=256, device="cpu", dtype=torch.float32)
    replay = TierReplay.even([0.3, 0.6], 2, 2, "cpu") if isinstance(cache, CompressionPolicy) else None
    return LLM(weights, cache, replay=replay, **({"max_requests": 4, "max_tokens": 128} | options))


@pytest.mark.parametrize("cache", ["fp16", POLICY], ids=["fp16", "policy"])
def test_pages_and_preemptions_are_those_of_a_real_run(cache):
    """A pool too small for all: requests leave, wait and come back in the same order."""

    def course(llm):
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        for length in (50, 40, 30, 20, 10):
            llm.add([1] * length, params)
        first, seen = min(own.number for own in llm.scheduler.waiting), []
        while not llm.scheduler.idle:
            outputs = llm.step()
            free = llm.cache.memory.synchronize_counts()
            seen.append((free, [(own.number - first, len(own.tokens), own.preemptions) for own in outputs]))
        return seen

    llm = llm_of(cache, pool_bytes=70_000 if cache == "fp16" else 105_000)
    real = course(llm)
    with virtual_time(llm, COSTS) as other:
        assert course(other) == real
    if cache == "fp16":
        assert max(times for _, outputs in real for *_, times in outputs) > 0, "nobody was preempted"
    assert course(llm) == real, "the model is back"


def test_time_is_what_the_steps_cost():
    with virtual_time(llm_of(), COSTS) as llm:
        llm.add([1] * 10, SamplingParams(max_tokens=3, ignore_eos=True))
        llm.step()
        assert llm.clock.now() == pytest.approx(0.005 + 1e-4 * 10)
        llm.step()
        (output,) = llm.step()
        assert output.token_times[-1] == llm.clock.now() == pytest.approx(0.006 + 2 * 0.01 + 1e-5 * (11 + 12))
        assert output.latency_per_token == pytest.approx(llm.clock.now() / 3)


def test_a_queue_builds_up_where_requests_come_faster_than_they_go():
    with virtual_time(llm_of(), COSTS) as llm:
        asked = {"requests": 60, "lengths": uniform_lengths((5, 30), (10, 40)), "limit": 1e6}
        calm, busy = (serve_poisson(llm, rate=rate, **asked) for rate in (0.2, 20.0))
    assert calm.answered == busy.answered == 60
    assert calm.mean == pytest.approx(0.012, rel=0.2)
    assert busy.mean > 3 * calm.mean


def test_a_steady_state_lasts_lifetimes_in_no_time():
    pool = 100_000
    found = {}
    for cache in ("fp16", Precision(4, 2)):
        with virtual_time(llm_of(cache, pool_bytes=pool, max_requests=16), COSTS) as llm:
            found[cache] = steady_state(llm, prompt=20, generated=100, steps=150, warm_up=100)
    assert found[Precision(4, 2)].mean_batch > 1.3 * found["fp16"].mean_batch
    assert found["fp16"].seconds == pytest.approx(150 * 0.02, rel=0.3)


def test_costs_are_measured_and_checked():
    costs = StepCosts.measure(llm_of(), [1, 2, 4, 64], repeats=2)
    assert costs.batches == (1, 2, 4)
    assert costs.generation(3, 100) > 0
    assert costs.worst_error >= 0
    with pytest.raises(ValueError, match="batches are \\(4, 1\\); they must grow"):
        StepCosts((4, 1), (0.0, 0.0), (0.0, 0.0), 0.0, 0.0)
    with pytest.raises(ValueError, match="1 batches, 0 fixed costs"):
        StepCosts((4,), (), (0.0,), 0.0, 0.0)
    with pytest.raises(ValueError, match="the pool holds no 4 requests"):
        StepCosts.measure(llm_of(pool_bytes=40_000), [4], repeats=1)


def test_a_policy_without_a_replay_and_a_busy_engine_are_refused():
    llm = llm_of()
    llm.add([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="requests are under way"), virtual_time(llm, COSTS):
        pass
    weights = Weights.random(SHAPE, max_positions=64, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a replay"), virtual_time(LLM(weights, POLICY, max_tokens=64), COSTS):
        pass


def test_a_virtual_clock_stands_still_by_itself():
    clock = VirtualClock()
    clock.sleep(-1.0)
    assert clock.now() == 0
    clock.sleep(2.5)
    assert clock.now() == 2.5


def test_a_part_of_a_growing_list_stays_as_it_was():
    items = [1, 2, 3]
    part = Part(items, 1)
    items += [4, 5]
    assert (len(part), list(part), part[-1], part[:5], part) == (2, [2, 3], 3, (2, 3), [2, 3])
    assert part != [2, 4]
    assert part == (2, 3)
    with pytest.raises(IndexError):
        part[2]
