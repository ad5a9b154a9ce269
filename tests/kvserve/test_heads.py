"""Head scores follow their definition, tell far-looking heads from near-looking ones, and are kept with provenance."""

import dataclasses
import json

import pytest
import torch
from kvserve_helpers import layout_of
from tiny import save, tiny_gemma3, tiny_llama, tiny_qwen2
from transformers import PreTrainedTokenizerFast

from diffkv_repro.kvserve.heads import HeadScores, score_heads
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.models import UnsupportedAttention, load_model

TEXT = " ".join(f"w{index * 7 % 90 + 3}" for index in range(60))


def loaded_of(model, folder):
    loaded = load_model(str(save(model, folder)), device="cpu", dtype=torch.float32)
    # transformers has a tokenizer class of its own for some families, which does not know our words.
    return dataclasses.replace(loaded, tokenizer=PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen2])
def loaded(request, tmp_path_factory):
    return loaded_of(request.param(), tmp_path_factory.mktemp("model"))


def naive(loaded, text, span):
    """From the projections themselves, before the model turns anything."""
    model, layout, dim = loaded.model, loaded.layout, loaded.layout.head_dim
    seen = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            module = getattr(layer.self_attn, name)
            hooks.append(module.register_forward_hook(lambda m, i, out, key=(index, name): seen.update({key: out[0]})))
    with torch.no_grad():
        model(**loaded.tokenizer(text, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    embed = model.model.rotary_emb
    cos, sin = embed(torch.zeros(1, 1), torch.arange(span)[None])

    def turned(vector, position):
        half = torch.cat([-vector[dim // 2 :], vector[: dim // 2]])
        return vector * cos[0, position] + half * sin[0, position]

    scores = torch.zeros(len(layout.layers), layout.kv_heads, dtype=torch.float64)
    for index in range(len(layout.layers)):
        queries = seen[index, "q_proj"].mean(dim=0).view(layout.heads, dim)
        keys = seen[index, "k_proj"].mean(dim=0).view(layout.kv_heads, dim)
        for head in range(layout.heads):
            query = turned(queries[head], span - 1)
            logits = torch.stack([query @ turned(keys[head // layout.group], at) for at in range(span)]) / dim**0.5
            weights = logits.double().softmax(dim=0)
            area = sum(float(weights[: at + 1].sum()) for at in range(span)) / span
            scores[index, head // layout.group] += area / layout.group
    return scores


def test_equal_to_the_definition(loaded):
    scores = score_heads(loaded, [TEXT], span=40)
    torch.testing.assert_close(scores.tensor, naive(loaded, TEXT, 40), rtol=1e-4, atol=1e-5)


def test_texts_are_averaged_and_cut(loaded):
    short = score_heads(loaded, [TEXT], span=30, longest=20)
    assert short.scores == score_heads(loaded, [" ".join(TEXT.split()[:20])], span=30).scores
    both = score_heads(loaded, [TEXT, "w5 w6 w7"], span=30)
    parts = [score_heads(loaded, [text], span=30).tensor for text in (TEXT, "w5 w6 w7")]
    torch.testing.assert_close(both.tensor, sum(parts) / 2)


def test_an_even_head_scores_a_half_and_a_far_one_more(tmp_path):
    model = tiny_llama(heads=4, kv_heads=2)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    scores = score_heads(loaded_of(model, tmp_path), [TEXT], span=50)
    assert scores.scores[0] == pytest.approx((0.51, 0.51))
    assert all(0 < score <= 1 for row in scores.scores for score in row)


def test_scores_are_kept_with_where_they_come_from(loaded, tmp_path):
    scores = score_heads(loaded, [TEXT], span=30)
    again = HeadScores.load(scores.save(tmp_path / "heads.json"))
    assert again == scores
    about = json.loads((tmp_path / "heads.json").read_text())
    assert about["fingerprint"] == loaded.fingerprint
    assert about["settings"]["texts"] == 1
    assert {"device", "date", "commit", "versions"} <= set(about["provenance"])
    scores.require(KVLayout.of(loaded))
    with pytest.raises(ValueError, match="needed are 2 x 3"):
        scores.require(layout_of())


def test_induction_is_another_way_to_score(loaded):
    scores = score_heads(loaded, [], method="induction")
    assert scores.method == "induction"
    assert scores.tensor.shape == (len(loaded.layout.layers), loaded.layout.kv_heads)


def test_bad_requests_are_named(loaded, tmp_path):
    with pytest.raises(ValueError, match="unknown method 'gate'; allowed are mean-attention, induction, gates"):
        score_heads(loaded, [TEXT], method="gate")
    with pytest.raises(ValueError, match="no text was given"):
        score_heads(loaded, [])
    with pytest.raises(ValueError, match="a text to score heads on is empty"):
        score_heads(loaded, [""])
    with pytest.raises(ValueError, match="not finite"):
        HeadScores(((float("nan"),),), "induction", "", "")
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no head scores"):
        HeadScores.load(tmp_path / "heads.json")
    (tmp_path / "sliding").mkdir()
    with pytest.raises(UnsupportedAttention):
        score_heads(loaded_of(tiny_gemma3(), tmp_path / "sliding"), [TEXT])
