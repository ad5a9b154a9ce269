import json

import pytest
import torch

from diffkv_repro.diffkv.bench_memory import bench_memory


def test_every_manager_is_timed_in_both_phases_and_moves_the_same_pages():
    pytest.importorskip("numba")
    before = torch.get_num_threads()
    rows = bench_memory([1, 3], length=70, layers=2, kv_heads=2, device="cpu", repeats=2, python_repeats=2)
    for batch in (1, 3):
        for phase in ("prompt", "generation"):
            alike = [row for row in rows if (row.batch, row.phase) == (batch, phase)]
            assert {row.manager for row in alike} == {"device", "host, Python", "host, compiled"}
            threads = [row.threads for row in alike if row.manager == "host, compiled"]
            assert threads[0] == 1
            assert threads == sorted(set(threads))
            assert len({row.pages for row in alike}) == 1
            assert all(0 < row.least <= row.median <= row.most for row in alike)
            assert {row.kernels for row in alike} == {"torch twin", "numpy", "numba"}
    assert all(row.pages > 0 for row in rows if row.phase == "prompt")
    assert torch.get_num_threads() == before
    assert json.loads(json.dumps([row.as_dict() for row in rows]))[0]["clock"] == "host"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batches": []}, r"batches are \[\]; at least one"),
        ({"batches": [2, 0]}, r"batches are \[2, 0\]"),
        ({"batches": [1], "length": 0}, "length is 0; it must be at least 1"),
        ({"batches": [1], "repeats": 0}, "repeats is 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        bench_memory(**sizes)
