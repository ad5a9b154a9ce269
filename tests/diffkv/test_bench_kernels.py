import pytest
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import bench_kernels
from diffkv_repro.diffkv.bench_kernels import MIXES, KernelTiming, fastest_peer


def timing(kernel, cache, median, batch=32, length=4096):
    return KernelTiming(kernel, cache, batch, length, True, median, median, median, 3, 4e6, 2e12, "some GPU")


def test_every_mix_names_precisions_and_shares_of_at_most_all_tokens():
    for precisions, shares in MIXES.values():
        assert [str(Precision.parse(name)) for name in precisions if name != "FP16"] == [
            name for name in precisions if name != "FP16"
        ]
        assert len(precisions) == len(shares)
        assert 0 < sum(shares) <= 1


def test_the_peer_is_the_quickest_of_others_at_this_size():
    timings = [
        timing("cuda", "FP16", 1.0), timing("cuDNN", "FP16 contiguous", 3.0), timing("flash", "FP16 contiguous", 2.0),
        timing("flash", "FP16 contiguous", 0.5, batch=8),
    ]  # fmt: skip
    assert fastest_peer(timings, 32, 4096).median == 2.0


def test_share_of_the_ceiling():
    assert timing("cuda", "K8V4", 4.0).of_ceiling == pytest.approx(0.5)  # 4 MB in 4 us are 1 TB/s of 2
    assert "50 % of the read bandwidth" in timing("cuda", "K8V4", 4.0).summary()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_bad_input_and_no_device():
    with pytest.raises(ValueError, match="unknown mix 'K3V3'; there are K8V8"):
        next(bench_kernels.bench_kernels(mixes=["K3V3"]))
    with pytest.raises(RuntimeError, match="there is none"):
        next(bench_kernels.bench_kernels())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_time_beats_the_memory():
    for found in bench_kernels.bench_kernels([64], [8192], repeats=5):
        assert 0 < found.least <= found.median <= found.most
        assert found.of_ceiling < 1.1, found.summary()
