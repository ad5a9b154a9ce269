import pytest

from diffkv_repro.engine.measure.experiments import Setup, arrivals, breakdown, end_to_end, throughput
from diffkv_repro.engine.measure.load import Served, knee, uniform_lengths
from diffkv_repro.models.shapes import ModelShape

SHAPE = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
SETUP = Setup(SHAPE, "cpu")


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
