"""The bench of codecs, on a CPU, where it goes the same way; and what becomes of a codec that ends its process."""

import json
import math
import os
import signal

import pytest
import torch
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.core.processes import Apart, ProcessFailed
from diffkv_repro.evaluation import gpu_rates
from diffkv_repro.evaluation.gpu_rates import (
    STAGES,
    CacheShape,
    CodecRate,
    Job,
    bench_codecs,
    cache_of,
    measure,
    sample_of,
)

SMALL = CacheShape(2, 2, 16)


def job(codec="none", **changed):
    return Job(codec, (5, 9), SMALL, 16, 1, "cpu", 0, **changed)


def test_every_stage_of_every_length_has_a_row():
    rows = [*measure(job()), *measure(job("zstd"))]
    assert [(row.tokens, row.stage) for row in rows] == [
        *((tokens, stage) for tokens in (5, 9) for stage in STAGES[:5]),
        *((tokens, stage) for tokens in (5, 9) for stage in STAGES[5:]),
    ]
    for row in rows:
        assert row.raw_bytes == 4 * 2 * 2 * 16 * row.tokens == 2 * cache_of(job(), row.tokens).numel()
        assert 0 < row.least <= row.median <= row.most
        assert row.rate == row.raw_bytes / row.median
        assert math.isnan(row.ratio) == (row.codec == "none")
        assert "GB/s of raw KV" in row.summary()
        assert CodecRate(**json.loads(json.dumps(row.as_dict()))) == row


def test_coded_bytes_are_code_and_scales():
    rows = list(measure(job("bitpack")))
    vectors = 2 * 2 * 2 * 5
    assert rows[0].coded_bytes == vectors * 16 // 2 + 4 * vectors
    assert rows[0].ratio == pytest.approx(32 / 12)


def test_a_sample_is_said_over_and_its_heads_put_side_by_side():
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(3, 3, 8, generator=generator).half() for _ in range(2)) for _ in range(2)]
    sample = sample_of(pairs, SMALL)
    assert sample.shape == (1, 2, 2, 3, 16)
    assert torch.equal(sample[0, 0, 0], torch.cat([pairs[0][0][0], pairs[0][0][1]], dim=-1))
    assert torch.equal(sample[0, 1, 1], torch.cat([pairs[0][1][2], pairs[1][1][0]], dim=-1))
    kv = cache_of(job(sample=sample), 7)
    assert kv.shape == (2, 2, 2, 7, 16)
    assert torch.equal(kv[1, ..., 3:6, :], sample[0])
    assert torch.equal(kv[..., 6, :], kv[..., 0, :])
    with pytest.raises(ValueError, match="the sample has 3 heads of 8 channels; a layer takes 4"):
        sample_of(pairs[:1], SMALL)


def crash(number):
    yield number
    os.kill(os.getpid(), signal.SIGSEGV)


def raises():
    raise ValueError("no such thing")
    yield


def test_a_process_that_crashes_or_raises_says_so():
    crashing, raising = Apart(crash, 7), Apart(raises)
    found = []
    with pytest.raises(ProcessFailed, match="ended by SIGSEGV"):
        found.extend(crashing.results(60))
    assert found == [7]
    with pytest.raises(ProcessFailed, match="ValueError: no such thing"):
        list(raising.results(60))
    for process in (crashing, raising):
        process.close()


def test_one_codec_that_fails_leaves_the_others_their_rows(tmp_path):
    """nvCOMP's binding cannot code a tensor of the CPU: its rows say why, and those of the other codecs stand."""
    output = tmp_path / "rates.json"
    words = ["bench", "codec", "--device", "cpu", "--codec", "nvcomp-ans", "--codec", "zstd", "--tokens", "5"]
    words += ["--layers", "1", "--kv-heads", "2", "--repeats", "1", "--output", str(output)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = [CodecRate(**row) for row in json.loads(output.read_text())]
    assert [row.codec for row in rows] == ["none"] * 5 + ["nvcomp-ans"] * 4 + ["zstd"] * 4
    assert [bool(row.error) for row in rows] == [False] * 5 + [True] * 4 + [False] * 4
    assert all("nvcomp-ans" in row.error and math.isnan(row.rate) for row in rows[5:9])
    assert "nvcomp-ans, 5 tokens, codec encode: " in done.output


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="unknown codec 'gzip'"):
        next(bench_codecs(["gzip"], device="cpu"))
    with pytest.raises(ValueError, match=r"tokens are \[0\]"):
        next(bench_codecs(["zstd"], [0], device="cpu"))
    with pytest.raises(ValueError, match=r"sample is \(2, 3\); allowed is \[layers, 2, 8, tokens, 128\]"):
        next(bench_codecs(["zstd"], device="cpu", sample=torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="layers is 0"):
        CacheShape(layers=0)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="there is none"):
            next(bench_codecs())


def test_the_stages_of_a_codec_and_of_the_quantiser_are_all_of_them():
    assert gpu_rates._stages("none") + gpu_rates._stages("zstd") == STAGES
