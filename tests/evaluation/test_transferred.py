"""KVServe's profiles as a method: decoding goes on from the frame, whose bytes are counted, and lm-eval runs it."""

import json
import re
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
import yaml
from typer.testing import CliRunner

from diffkv_repro.cache import FullPrecision, compress
from diffkv_repro.cli import app
from diffkv_repro.evaluation.decoding import hold_back
from diffkv_repro.evaluation.finished import identity_of
from diffkv_repro.evaluation.generation import run_tasks
from diffkv_repro.evaluation.methods import make_method, parameters
from diffkv_repro.evaluation.transferred import Transferred, assets_for, layout_of
from diffkv_repro.kvserve import NAMED, HeadScores, Profile, prefill
from diffkv_repro.kvserve.quality import continue_from
from diffkv_repro.models import UnsupportedAttention, load_model
from diffkv_repro.workloads.tasks import Item
from tests.cache_helpers import ids_of
from tests.evaluation.test_lm_eval_model import folder, tasks  # noqa: F401 (fixtures)
from tests.tiny import save, tiny_gemma3

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

PROFILES = ["none", "kivi-2bit", "hadamard | mixhq r=0.5 K6/4 V5/3 | ans", "snapkv", "duoattention", "kvquant-3bit"]


@pytest.fixture(scope="module")
def loaded(folder):  # noqa: F811
    return load_model(folder, device="cpu")


def method(loaded, profile):
    return make_method("kvserve", loaded, profile=profile, texts="prose")


@pytest.mark.parametrize("profile", PROFILES)
def test_decoding_goes_on_from_what_the_frame_gives_back(loaded, profile):
    ids, own = ids_of(60, seed=3), method(loaded, profile)
    with torch.inference_mode(), compress(loaded.model, own) as session:
        cache = hold_back(session, loaded.model, ids, torch.ones_like(ids), 10)
        logits = loaded.model(ids[:, 50:], past_key_values=cache.hf).logits[0].float().log_softmax(-1)
    own_prompt = prefill(loaded, ids[:, :50], dtype=torch.float16, window=32)
    assets = assets_for(loaded, own.profile)
    frame = own.profile.encode(own_prompt.kv, own.layout, assets=with_tokens(assets, own_prompt.token_scores))
    expected = continue_from(loaded, frame.decode(), ids[:, 50:])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert cache.reads == 10 * 3
    sent = cache.kv_bytes()
    assert sent.total == frame.nbytes
    assert sent.payload == frame.code_bytes
    assert 1 / sent.true_ratio == pytest.approx(frame.ratio)


def with_tokens(assets, scores):
    return replace(assets, layer_scores=None, token_scores=scores)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_padded_batch_is_its_prompts_alone(loaded, profile):
    prompts = [" ".join(f"w{index * step % 90 + 3}" for index in range(length)) for length, step in ((40, 7), (9, 5))]
    items = [Item("made", prompt, "w5", "line", 6) for prompt in prompts]
    own = method(loaded, profile)
    together, alone = (run_tasks(loaded, items, own, batch_size=size) for size in (2, 1))
    assert [result.text for result in together] == [result.text for result in alone]
    assert all(result.reads > 0 for result in together)


def test_no_compression_is_full_precision_and_two_levels_are_not(loaded):
    ids = ids_of(40, seed=1)
    found = {}
    for name, own in {"fp16": FullPrecision(), "none": method(loaded, "none"),
                      "coarse": method(loaded, "none | uniform K2 V2 | bitpack")}.items():  # fmt: skip
        with torch.inference_mode(), compress(loaded.model, own) as session:
            cache = hold_back(session, loaded.model, ids, torch.ones_like(ids), 8)
            found[name] = loaded.model(ids[:, 32:], past_key_values=cache.hf).logits
    torch.testing.assert_close(found["none"], found["fp16"], rtol=2e-2, atol=2e-2)  # FP16 frames of a float32 model
    assert not torch.allclose(found["coarse"], found["fp16"], atol=0.1)


def test_a_profile_is_a_name_or_a_line(loaded, tmp_path):
    assert method(loaded, "cachegen-1").profile == NAMED["cachegen-1"]
    assert method(loaded, "cachegen-1").label == "cachegen-1"
    line = "delta group=4 | kivi 4-bit g=16 R=16 | zstd level=3"
    assert method(loaded, line).profile == Profile.parse(line)
    assert str(Profile.parse(line)) == method(loaded, line).label == line
    scores = HeadScores(((0.1, 0.2),) * 3, "mean-attention", loaded.name, loaded.fingerprint)
    path = scores.save(tmp_path / "heads.json")
    assert make_method("kvserve", loaded, profile="kvserve-default", heads=str(path)).assets.heads == scores
    for wrong, message in [
        ("kvserv", "has 1 stages; write transforms | quantizer | codec, or none, lossless-zstd"),
        ("none | kivi 2-bits | ans", "'2-bits' is no parameter of kivi; write name=value"),
        ("none | kivi bits=9 | ans", "bits is 9"),
        ("hadamar | kivi | ans", "unknown transform 'hadamar'"),
        ("affine | kivi | ans", "transform affine needs diag maps"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            method(loaded, wrong)
    with pytest.raises(ValueError, match="unknown option profil of method kvserve"):
        make_method("kvserve", loaded, profil="none")
    with pytest.raises(ValueError, match="cannot be made before one is loaded"):
        make_method("kvserve")


def test_an_answer_is_known_by_all_that_it_depends_on(loaded):
    first, again = (method(loaded, "kvserve-default") for _ in range(2))
    assert identity_of(loaded, first, "packed") == identity_of(loaded, again, "packed")
    json.dumps(parameters(first))
    other = identity_of(loaded, method(loaded, "kvserve-hadamard"), "packed")
    assert identity_of(loaded, first, "packed") != other
    ranked = Transferred(first.profile, first.layout, assets_for(loaded, first.profile, texts=["w5 w6 w7 w8"]))
    assert identity_of(loaded, ranked, "packed") != identity_of(loaded, first, "packed")


def test_models_that_do_not_fit_are_refused(loaded, tmp_path):
    sliding = load_model(str(save(tiny_gemma3(), tmp_path)), device="cpu")
    with pytest.raises(UnsupportedAttention, match="a frame holds whole caches only"):
        layout_of(sliding)
    with pytest.raises(ValueError, match="the profile's layout is"), compress(sliding.model, method(loaded, "none")):
        pass


def test_lm_eval_runs_a_profile_as_a_user_would(folder, tasks, tmp_path, monkeypatch):  # noqa: F811
    # To find lm-eval's own ten thousand tasks takes seconds, and they are not wanted here.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    yaml_text = (tasks / "tiny_generation.yaml").read_text()
    assert yaml.safe_load(yaml_text)["output_type"] == "generate_until"
    profile = "hadamard | uniform K3 V3 channel/token | ans"
    arguments = [
        "--model", "kvserve", "--model_args", f"pretrained={folder},profile={profile}",
        "--tasks", "tiny_choice,tiny_generation", "--include_path", str(tasks), "--limit", "3",
        "--output_path", str(tmp_path / "results.json"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["lm-eval", "run", *arguments])
    assert done.exit_code == 0, done.output
    assert "|tiny_choice" in done.stdout
    assert re.search(rf"tiny_generation: {re.escape(profile)}, .* 3 requests: KV [\d.]+ % of FP16", done.stderr)
    (path,) = tmp_path.glob("results_*.json")
    report = json.loads(path.read_text())["config"]["diffkv_repro"]
    assert report["parameters"]["profile"]["quantizer"]["key_levels"] == 3
    for task in ("tiny_choice", "tiny_generation"):
        assert report["kv"][task]["reads"] > 0
        assert 0 < report["kv"][task]["nominal"] < report["kv"][task]["true"]
    refused = CliRunner().invoke(app, ["lm-eval", "run", *arguments, "--model_args", f"pretrained={folder},profile=x"])
    assert refused.exit_code == 2
    assert "profile 'x' has 1 stages" in refused.stderr
