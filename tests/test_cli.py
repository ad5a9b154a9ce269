"""The commands that need the real model, at tiny sizes, and their refusals."""

import json
import re

import pytest
from tiny import save, tiny_llama
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.diffkv import CompressionPolicy
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


def test_bench_memory_prints_every_manager_and_keeps_the_times(tmp_path):
    sizes = ("--batch", "1", "--batch", "2", "--length", "40", "--layers", "1", "--kv-heads", "2", "--repeats", "2")
    done = call("bench", "memory", *sizes, "--output", str(tmp_path / "times.json"))
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "times.json").read_text())
    assert {(row["phase"], row["batch"]) for row in rows} == {(p, b) for p in ("prompt", "generation") for b in (1, 2)}
    for word in ("host: ", "host, Python", "host, compiled", "median ms"):
        assert word in done.stdout


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of a tiny model and of texts in its words."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "texts").mkdir()
    for index in range(2):
        words = (f"w{3 + (index + 5 * step + step // 7) % 94}" for step in range(130))
        (root / "texts" / f"{index}.txt").write_text(" ".join(words))
    return str(save(tiny_llama(), root / "model")), str(root / "texts")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def test_calibrate_writes_a_policy_that_loads(tiny, tmp_path, kept):
    model, texts = tiny
    sizes = ("--texts-count", "2", "--tokens", "100", "--tolerance", "0.1", "--tiers", "K8V8-K4V4")
    done = call("calibrate", str(tmp_path / "policy.json"), "--model", model, "--texts", texts, *sizes)
    assert done.exit_code == 0
    policy = CompressionPolicy.load(tmp_path / "policy.json")
    assert [str(tier) for tier in policy.tiers] == ["K8V8", "K4V4"]
    assert (policy.prompt_divisor, policy.group_max, policy.bias_free) == ("length", "each-step", False)
    assert f"-> {policy.label}: " in done.stdout
    assert done.stdout.count(" of FP16, +") == 10
    assert f"written: {tmp_path / 'policy.json'}" in done.stdout.replace("\n", " ")
    assert len(list(kept.glob("*.json"))) == 11, "ten settings and FP16"


def test_calibrate_on_a_task_says_its_rule(tiny, tmp_path, kept):
    model, texts = tiny
    sizes = ("--texts-count", "1", "--tokens", "100", "--tolerance", "9", "--task", "arithmetic", "--items", "2")
    done = call("calibrate", str(tmp_path / "policy.json"), "--model", model, "--texts", texts, *sizes)
    assert done.exit_code == 0, done.stderr
    policy = CompressionPolicy.load(tmp_path / "policy.json")
    document = json.loads((tmp_path / "policy.calibration.json").read_text())
    assert document["chosen"] == policy.label
    assert document["rule"].endswith("accuracy at most 0.02 below FP16 on 2 items of arithmetic")
    assert document["tried"][0]["alphas"] == [0.0, 0.0]
    assert (kept / "tasks.sqlite").exists()
    assert ", accuracy -" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "chess"], "unknown task 'chess'; allowed are recall, uuid_recall, passkey, arithmetic, copy"),
        (["--tiers", "K8V4"], "tiers is 'K8V4'; write a high and a low precision, as K8V4-K4V2"),
        (["--tiers", "K8V4-K3V2"], "key_bits is 3; allowed are 1, 2, 4, 8, 16"),
        (["--texts", "nowhere"], "unknown text source 'nowhere'; allowed are prose, code, dialogue"),
        (["--texts-count", "9"], "2 documents hold only 2 windows of 100 tokens, 9 are wanted"),
        (["--bias-free", "--texts-count", "1"], "bias-free keys are asked for, but the keys of LlamaForCausalLM"),
    ],
)
def test_calibrate_refuses_in_words(tiny, tmp_path, kept, options, message):
    model, texts = tiny
    base = ("--model", model, "--texts", texts, "--tokens", "100")
    done = call("calibrate", str(tmp_path / "policy.json"), *base, *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "policy.json").exists()


def test_bench_compress_prints_percentages(tiny):
    done = call("bench", "compress", "--model", tiny[0], "--tokens", "64", "--repeats", "2")
    assert done.exit_code == 0
    paper, released = done.stdout.splitlines()
    for line in (paper, released):
        share = re.search(r"^model, 64 tokens, DiffKV K8V4-K4V2, .*: .* take ([\d.]+)% of a plain prefill", line)
        assert float(share[1]) > 0
    assert "last 64 queries" in released
    assert "last 64 queries" not in paper
    refused = call("bench", "compress", "--model", tiny[0], "--tokens", "257")
    assert refused.exit_code == 2
    assert "tokens is 257; allowed are 3 to 256" in refused.stderr


def test_bench_engine_prints_and_keeps_every_part(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    from diffkv_repro.models.shapes import SHAPES, ModelShape

    small = {"layers": 1, "hidden": 32, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 50}
    monkeypatch.setitem(SHAPES, "tiny", ModelShape("tiny", "", **small))
    sizes = ["--shape", "tiny", "--device", "cpu", "--batch", "2", "--length", "70", "--pool-gb", "0.003"]
    runs = ["--prompt", "20", "--generated", "40", "--rate", "1000", "--requests", "4"]
    done = call("bench", "engine", *sizes, *runs, "--output", str(tmp_path / "engine.json"))
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "engine.json").read_text())
    assert {"breakdown", "latency", "throughput", "arrivals"} <= set(kept)
    assert [row["phase"] for row in kept["breakdown"]] == ["prompt", "generation"]
    assert {row["cache"] for row in kept["latency"]} == {"FP16", "FP16, read per query head", "DiffKV"}
    refused = call("bench", "engine", "--shape", "gpt-9")
    assert refused.exit_code == 2
    assert "no shape called 'gpt-9'" in refused.output
    assert kept["shares"] == [0.3, 0.6]
    assert "shares of the tiers: given: 0.3, 0.6 for every head" in done.output


def test_bench_tiers_records_what_bench_engine_replays(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    from diffkv_repro.models.shapes import SHAPES, ModelShape

    (model, texts), table = tiny, str(tmp_path / "table.json")
    sizes = ("--texts", texts, "--tokens", "100", "--prompt", "90", "--name", "Tiny")
    done = call("bench", "tiers", "--model", model, *sizes, "-o", table)
    assert done.exit_code == 0, done.output
    recorded = json.loads((tmp_path / "table.json").read_text())
    assert (recorded["name"], recorded["tokens"]) == ("Tiny", 2 * (100 - 64))
    assert "2 texts (texts) of 100 tokens, the first 90 as the prompt" in recorded["source"]
    small = {"layers": 3, "hidden": 32, "intermediate": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocab": 50}
    monkeypatch.setitem(SHAPES, "tiny", ModelShape("tiny", "", **small))
    run = ("--part", "latency", "--shape", "tiny", "--device", "cpu", "--batch", "1", "--length", "70")
    done = call("bench", "engine", *run, "--shares", table, "--output", str(tmp_path / "engine.json"))
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "engine.json").read_text())
    assert kept["source"] == recorded["source"]
    heads = [own for layer in recorded["shares"] for own in layer]
    assert kept["shares"] == pytest.approx([sum(own[tier] for own in heads) / len(heads) for tier in (0, 1)])
    assert f"shares of the tiers: {recorded['source']}" in done.output
    for wrong, message in (
        ("nowhere", "no table of shares 'nowhere'"),
        ("0.7,0.6", "sum of at most 1"),
        ("0.5", "2 tiers"),
    ):
        refused = call("bench", "engine", *run, "--shares", wrong)
        assert refused.exit_code == 2
        assert message in refused.output
