"""How long a compressed cache writes what FP16 writes."""

import pytest
import torch
from cache_helpers import ids_of
from pandas.testing import assert_frame_equal
from tiny import save, tiny_llama

from diffkv_repro.baselines.budgets import AtShare, EqualBudget
from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.evaluation import divergence as module
from diffkv_repro.evaluation import workers
from diffkv_repro.evaluation.divergence import divergence
from diffkv_repro.models import load_model
from diffkv_repro.workloads import Window

COARSE = Uniform("K1V1")
SIZES = {"prompt_tokens": 20, "new_tokens": 8}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("model"))), device="cpu")


@pytest.fixture(scope="module")
def windows():
    return [Window("made", index, ids_of(30, seed=index)) for index in range(3)]


def greedy(model, ids, method, count):
    """One token after the other, through the cache."""
    written = []
    with torch.inference_mode(), compress(model, method, storage="simulated") as session:
        cache = session.new_cache()
        token = model(ids, past_key_values=cache.hf, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
        for _ in range(count):
            written.append(int(token))
            token = model(token, past_key_values=cache.hf, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
    return written


def test_agreement_ends_at_the_first_difference(loaded, windows, tmp_path):
    table = divergence(loaded, windows, [COARSE], tmp_path, **SIZES)
    assert table["window"].tolist() == ["made @0", "made @1", "made @2"] * 2
    assert table["method"].tolist() == ["FP16"] * 3 + ["K1V1"] * 3
    assert (table["agreed"][:3] == 8).all()
    for window, agreed in zip(windows, table["agreed"][3:], strict=True):
        ids = window.input_ids[:, :20]
        exact, coarse = (greedy(loaded.model, ids, method, 8) for method in (FullPrecision(), COARSE))
        same = [one == other for one, other in zip(exact, coarse, strict=True)]
        assert agreed == (same.index(False) if False in same else 8)
    assert (table["agreed"][3:] < 8).any()
    assert (table["nominal"][:3] == 1).all()
    assert (table["nominal"][3:] == 1 / 16).all()


def test_batches_change_nothing(loaded, windows, tmp_path):
    together = divergence(loaded, windows, [COARSE], tmp_path / "a", **SIZES)
    alone = divergence(loaded, windows, [COARSE], tmp_path / "b", batch=1, **SIZES)
    order = ["method", "window"]
    sort = {"by": order, "ignore_index": True}
    assert_frame_equal(together.sort_values(**sort)[[*order, "agreed"]], alone.sort_values(**sort)[[*order, "agreed"]])


def test_what_is_kept_is_not_generated_again(loaded, windows, tmp_path, monkeypatch):
    first = divergence(loaded, windows, [COARSE], tmp_path, **SIZES)
    real, seen = module.compress, []

    def counting(model, method, **options):
        seen.append(method.label)
        return real(model, method, **options)

    monkeypatch.setattr(module, "compress", counting)
    assert_frame_equal(divergence(loaded, windows, [COARSE], tmp_path, **SIZES), first)
    assert seen == []
    (path,) = (path for path in tmp_path.glob("*.json") if '"nominal": 1.0' not in path.read_text())
    for damaged in ('{"tokens": [[1', "", "{}", "[]"):
        seen.clear()
        path.write_text(damaged)
        assert_frame_equal(divergence(loaded, windows, [COARSE], tmp_path, **SIZES), first)
        assert seen == ["K1V1"]


def refuse(*_arguments, **_options):
    raise AssertionError("generated again")


def test_processes_give_the_table_of_one(loaded, windows, tmp_path, monkeypatch):
    methods = [COARSE, Uniform("K8V4")]
    alone = divergence(loaded, windows, methods, tmp_path / "one", batch=2, workers=1, **SIZES)
    monkeypatch.setattr(workers, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(module, "compress", refuse)  # in this process; the others import their own
    together = divergence(loaded, windows, methods, tmp_path / "two", batch=2, workers=2, **SIZES)
    assert_frame_equal(together, alone)
    kept = [sorted((path.name, path.read_text()) for path in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2 * 3


def test_full_precision_is_there_once(loaded, windows, tmp_path):
    table = divergence(loaded, windows[:1], [FullPrecision(), COARSE], tmp_path, **SIZES)
    assert table["method"].tolist() == ["FP16", "K1V1"]


def test_nothing_to_generate_is_refused(loaded, windows, tmp_path):
    for sizes in ({"prompt_tokens": 20, "new_tokens": 0}, {"prompt_tokens": 0, "new_tokens": 5}):
        with pytest.raises(ValueError, match="both must be at least 1"):
            divergence(loaded, windows, [COARSE], tmp_path, **sizes)
    with pytest.raises(ValueError, match="fit it to prompts first"):
        divergence(loaded, windows, [AtShare(EqualBudget(), 0.5, "equal")], tmp_path, **SIZES)
