"""The commands that need the real model, at tiny sizes, and their refusals."""

import re

import pytest
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.study.records import read_record


def call(*arguments):
    return CliRunner().invoke(app, arguments)


def test_fetch_says_what_it_got():
    done = call("fetch", "smollm2-135m")
    assert done.exit_code == 0
    assert done.stdout.startswith("smollm2-135m: 30 full layers, 9/3 heads, head_dim 64; 4-bit GGUF weights (Q4_1)")
    refused = call("fetch", "/no/such/folder")
    assert refused.exit_code == 2
    assert "there is no file or folder '/no/such/folder'" in refused.stderr


def test_bench_stats_prints_ratios_and_keeps_them(tmp_path):
    sizes = ("--tokens", "64", "--repeats", "2", "--lengths", "64,128")
    done = call("bench", "stats", *sizes, "--record", str(tmp_path))
    record = read_record(tmp_path, "ours-stats-cost")
    assert set(record.measurements) == {"stats_time_ratio", "stats_memory_over_linear"}
    assert record.provenance["config"]["timed_tokens"] == 64
    assert done.exit_code == 0
    ratio = re.search(r"64 tokens: statistics take ([\d.]+) x a plain prefill \(median of 2", done.stdout)
    assert 0.2 < float(ratio[1]) < 20
    assert re.search(r"at 64 tokens, \d+ MiB at 128: [\d.]+ x the linear prediction", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "--lengths", "8"], "--lengths is '8'; it must be two numbers"),
        (["stats", "--lengths", "9,9"], "the first must be at least 2 and less than the second"),
        (["stats", "--tokens", "9000"], "9000 tokens are more than the context of smollm2-135m, 8192"),
        (["stats", "--lengths", "8,9000"], "9000 tokens are more than the context"),
        (["load", "--model", "gpt2"], "'gpt2' is not a packaged model; there are smollm2-135m"),
    ],
)
def test_bench_refuses_before_it_measures(arguments, message):
    done = call("bench", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_doctor_finds_the_required_good():
    done = call("doctor")
    assert done.exit_code == 0
    for line in ("versions", "NVIDIA GPU", "converted models", "browser", "free disk"):
        assert line in done.stdout
