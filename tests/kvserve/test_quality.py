"""Quality is that of a model that goes on from the cache that arrived."""

import pytest
import torch
from cache_helpers import ids_of
from tiny import save, tiny_llama

from diffkv_repro.kvserve import KV, LayerKV, Profile, prefill
from diffkv_repro.kvserve.codecs import BitPack
from diffkv_repro.kvserve.quality import Judge, continue_from
from diffkv_repro.kvserve.quantizers import Uniform
from diffkv_repro.models.zoo import load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(heads=6, kv_heads=2), tmp_path_factory.mktemp("tiny"))), device="cpu")


def test_an_untouched_cache_gives_what_one_prefill_gives(loaded):
    ids = ids_of(40)
    kv = prefill(loaded, ids[:, :25]).kv
    found = continue_from(loaded, kv, ids[:, 25:])
    with torch.inference_mode():
        whole = torch.log_softmax(loaded.model(ids).logits[0, 25:].float(), dim=-1)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_dropped_tokens_are_not_attended_to(loaded):
    ids = ids_of(30, seed=2)
    kv = prefill(loaded, ids[:, :20]).kv
    kept = torch.ones(2, 20, dtype=torch.bool)
    kept[1, 3:15] = False
    holed = KV(tuple(LayerKV(own.key, own.value, kept) for own in kv.layers))
    wild = KV(tuple(
        LayerKV(torch.where(kept[..., None], own.key, 1e3), torch.where(kept[..., None], own.value, -1e3), kept)
        for own in kv.layers
    ))  # fmt: skip
    torch.testing.assert_close(continue_from(loaded, holed, ids[:, 20:]), continue_from(loaded, wild, ids[:, 20:]))
    assert not torch.allclose(continue_from(loaded, holed, ids[:, 20:]), continue_from(loaded, kv, ids[:, 20:]))


def test_fewer_levels_lose_more_and_none_lose_nothing(loaded):
    judge = Judge(loaded, [ids_of(60, seed=seed) for seed in (1, 2)], continuation=12)
    exact = judge.judge(Profile())
    assert abs(exact.added_nll) < 1e-6
    assert exact.relative == pytest.approx(1)
    assert (exact.agreement, exact.prompts) == (1.0, 2)
    fine, coarse = (judge.judge(Profile((), Uniform(levels, levels), BitPack())) for levels in (256, 2))
    assert abs(fine.added_nll) < abs(coarse.added_nll)
    assert fine.agreement >= coarse.agreement
    assert fine.ratio < coarse.ratio


def test_what_cannot_be_judged_is_refused(loaded):
    with pytest.raises(ValueError, match="0 prompts"):
        Judge(loaded, [], continuation=1)
    with pytest.raises(ValueError, match="continuation 9; it must leave each prompt a token"):
        Judge(loaded, [ids_of(9)], continuation=9)
    with pytest.raises(ValueError, match="starts at position 5"):
        continue_from(loaded, KV.of(prefill(loaded, ids_of(9)).kv.pairs, start=5), ids_of(2))
