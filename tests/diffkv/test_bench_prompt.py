import pytest
import torch

from diffkv_repro.diffkv.bench_prompt import RULES, bench_prompt
from diffkv_repro.models.shapes import shape_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_device_it_says_so():
    with pytest.raises(RuntimeError, match="there is none"):
        bench_prompt(shape_of("llama3-8b"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compression_is_timed_with_its_parts():
    found = bench_prompt(shape_of("llama3-8b"), tokens=1024, repeats=2)
    assert [timing.rule for timing in found] == list(RULES)
    for timing in found:
        assert 0 < timing.significance < timing.compression
        assert timing.high == pytest.approx(0.3, abs=0.1)
        assert timing.low == pytest.approx(0.6, abs=0.1)
