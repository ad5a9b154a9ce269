import gc
import weakref

import pytest
import torch

from diffkv_repro.engine import TierReplay
from diffkv_repro.engine.measure import experiments
from diffkv_repro.engine.measure.experiments import Setup, arrivals, breakdown, end_to_end, throughput
from diffkv_repro.engine.measure.load import Served, knee, uniform_lengths
from diffkv_repro.models.shapes import ModelShape

SHAPE = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
SETUP = Setup(SHAPE, "cpu")
REPLAY = TierReplay(torch.tensor([[[0.9, 0.1], [0.0, 0.0]], [[0.2, 0.5], [0.1, 0.6]]]), "by hand")


def test_breakdown_has_a_row_a_phase_and_batch():
    rows = breakdown(SETUP, [1, 2], 70, repeats=2)
    assert [(row.phase, row.batch) for row in rows] == [
        (phase, batch) for batch in (1, 2) for phase in ("prompt", "generation")
    ]


def test_end_to_end_times_both_baselines():
    rows = list(end_to_end(SETUP, [(1, 80), (2, 100)], repeats=2))
    assert len(rows) == 6
    assert all(row["seconds"] > 0 for row in rows)


def test_throughput_and_arrivals_compare_both_caches():
    found = throughput(SETUP, pool_bytes=400_000, prompt=20, generated=60, max_requests=6, lifetimes=1)
    assert list(found) == ["FP16", "DiffKV"]
    assert all(own.found.per_second > 0 for own in found.values())
    lengths = uniform_lengths((3, 9), (2, 4))
    served = arrivals(
        SETUP, [0.5, 1e5], pool_bytes=400_000, requests=8, lengths=lengths, max_tokens=80, max_requests=4,
        check=(20.0, 6, lengths), limit=60,
    )  # fmt: skip
    assert all(own.served[0].answered == 8 for own in served.values())
    assert all(0.1 < own.virtual_over_real < 10 for own in served.values())


def test_the_knee_is_the_last_rate_below_twice_the_first_latency():
    def at(rate, mean, answered=4):
        return Served(rate, (mean,) * answered, answered, 4, 1.0)

    assert knee([at(1, 0.1), at(2, 0.15), at(4, 0.19), at(8, 0.5)]) == 4
    assert knee([at(1, 0.1), at(2, 0.1, answered=3)]) == 1
    assert knee([at(1, 0.1, answered=0)]) == 0


def test_the_cost_model_of_a_setup_has_its_shares():
    assert SETUP.traffic().shares == (0.3, 0.6)
    assert SETUP.traffic().token_bytes(128) == pytest.approx(0.3 * 200 + 0.6 * 104 + 7.2)


def test_shares_and_source_of_a_setup_are_those_of_its_replay():
    setup = Setup(SHAPE, "cpu", REPLAY)
    assert setup.shares == setup.traffic().shares == pytest.approx((0.3, 0.3))
    assert setup.source == "by hand"
    llm = setup.engine(setup.weights(64), experiments.POLICY, max_requests=1, max_tokens=64)
    assert torch.equal(llm.cache.replay.shares, REPLAY.shares)
    assert SETUP.source == "given: 0.3, 0.6 for every head"
    for odd in ((0.3,), (0.2, 0.2, 0.2), (0.7, 0.6), (-0.1, 0.5), (float("nan"), 0.5)):
        with pytest.raises(ValueError, match="shares"):
            Setup(SHAPE, "cpu", odd)


def test_throughput_has_an_arm_for_each_replay_and_one_engine_at_a_time(monkeypatch):
    alive, made, replayed = [], [], []
    build = Setup.engine

    def watched(setup, weights, cache, **options):
        gc.collect()
        alive.append(sum(own() is not None for own in made))
        llm = build(setup, weights, cache, **options)
        made.extend(weakref.ref(own) for own in (llm, llm.cache.memory.pool))
        replayed.append(llm.cache.replay and llm.cache.replay.shares)
        return llm

    monkeypatch.setattr(Setup, "engine", watched)
    sizes = {"pool_bytes": 400_000, "prompt": 20, "generated": 60, "max_requests": 3}
    found = experiments.throughput(SETUP, **sizes, replays={"DiffKV, by hand": REPLAY})
    assert list(found) == ["FP16", "DiffKV", "DiffKV, by hand"]
    assert alive == [0, 0, 0], "an engine or its pool was still there when the next one came"
    assert replayed[0] is None
    assert torch.equal(replayed[1], torch.tensor([0.3, 0.6]).expand(2, 2, 2))
    assert torch.equal(replayed[2], REPLAY.shares)
    assert [own.source for own in found.values()] == ["", SETUP.source, "by hand"]
    assert all(own.found.per_second > 0 and own.peak_over_accounted == 0 for own in found.values())
    with pytest.raises(ValueError, match="replays are called DiffKV, as caches are"):
        experiments.throughput(SETUP, **sizes, replays={"DiffKV": REPLAY})
