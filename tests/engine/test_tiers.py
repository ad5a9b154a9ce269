"""Shares of tiers: counted right, kept whole, refused when damaged, and replayed head by head."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_gemma3, tiny_llama, tiny_qwen2

from diffkv_repro.cache import compress
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, TierReplay, Weights
from diffkv_repro.engine.measure.experiments import POLICY
from diffkv_repro.engine.measure.steps import fast_forward
from diffkv_repro.engine.measure.tiers import TierTable, record_tiers, recorded_tables, tier_table
from diffkv_repro.models.hf import attention_layout
from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.zoo import LoadedModel

WINDOW = 8
RULES = {
    "paper": CompressionPolicy.paper(group_max="each-step", window=WINDOW, alpha_high=1.5, alpha_low=0.6),
    "released": CompressionPolicy.released(window=WINDOW, alpha_high=1.5, alpha_low=0.6),
}


def loaded_of(model):
    return LoadedModel("tiny", model, None, attention_layout(model), "random", "none")


def texts_of(*lengths):
    draw = torch.Generator().manual_seed(1)
    windows = [SimpleNamespace(input_ids=torch.randint(3, 97, (1, n), generator=draw)) for n in lengths]
    return {"words": windows[:1], "others": windows[1:]} if len(windows) > 1 else {"words": windows}


def table_of(shares, tiers=POLICY.tiers, **fields):
    return TierTable(**{"name": "ours", "source": "by hand", "tiers": tiers, "tokens": 100, "shares": shares} | fields)


@pytest.mark.parametrize("prompt", [5, 33, 60])
@pytest.mark.parametrize("rule", RULES)
def test_recorded_shares_times_tokens_are_the_tokens_of_the_cache(rule, prompt):
    """Counted column by column, of a cache that was filled by plain calls of the model."""
    policy, model = RULES[rule], tiny_llama()
    texts = texts_of(60, 75, 61)
    table = record_tiers(loaded_of(model), policy, texts, prompt_tokens=prompt)
    expected = torch.zeros(3, 2, 2, dtype=torch.long)
    for window in [*texts["words"], *texts["others"]]:
        ids, columns = window.input_ids, window.input_ids.shape[1]
        with torch.inference_mode(), compress(model, policy, storage="packed") as session:
            cache = session.new_cache()
            model(input_ids=ids[:, :prompt], past_key_values=cache.hf, use_cache=True)
            for column in range(prompt, columns):
                model(input_ids=ids[:, column : column + 1], past_key_values=cache.hf, use_cache=True)
        for layer, own in enumerate(cache.layers):
            assert (own.store.tier[0, :, columns - WINDOW :] == 0).all(), "the window is in the first tier"
            for tier in range(2):
                expected[layer, :, tier] += (own.store.tier[0, :, : columns - WINDOW] == tier).sum(-1)
    assert table.tokens == 60 + 75 + 61 - 3 * WINDOW
    found = torch.tensor(table.shares, dtype=torch.float64) * table.tokens
    assert torch.equal(found.round().long(), expected)
    assert len(set(table.shares[0]) | set(table.shares[1])) > 1, "every head is alike: nothing was tested"
    assert all(word in table.source for word in ("tiny", policy.label, "3 texts (words, others) of 60 to 75"))
    assert table.provenance["config"]["prompt_tokens"] == prompt


def test_layers_with_a_sliding_window_are_not_in_the_table():
    table = record_tiers(loaded_of(tiny_gemma3()), RULES["paper"], texts_of(40))
    assert (table.layers, table.kv_heads) == (1, 1)


def test_bias_free_policies_are_recorded_too():
    policy = replace(RULES["released"], bias_free=True)
    assert "bias-free keys" in record_tiers(loaded_of(tiny_qwen2()), policy, texts_of(40)).source


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([WINDOW], {}, "texts have 8 tokens; more than the window of 8 count"),
        ([20], {"prompt_tokens": 21}, "prompt_tokens is 21; the shortest text has 20"),
        ([20], {"prompt_tokens": 0}, "prompt_tokens is 0"),
    ],
)
def test_texts_that_say_nothing_are_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        record_tiers(loaded_of(tiny_llama()), RULES["paper"], texts_of(*lengths), **options)
    twice = CompressionPolicy.paper("K8V4-K8V4", window=WINDOW)
    with pytest.raises(ValueError, match="cannot be told apart"):
        record_tiers(loaded_of(tiny_llama()), twice, texts_of(20))


def test_a_table_comes_back_as_it_was_saved(tmp_path):
    shares = torch.rand(5, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    shares[0, 0], shares[0, 1] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    table = table_of(shares.tolist(), provenance={"device": "ä", "config": {"texts": ["prose"]}})
    path = table.save(tmp_path / "new" / "table.json")
    assert TierTable.load(path) == table == tier_table(str(path))
    assert [own.name for own in path.parent.iterdir()] == ["table.json"], "nothing temporary stays"
    assert torch.equal(table.replay().shares, shares.float())
    assert table.replay().source == "by hand"


GOOD = {
    "format": 1, "name": "ours", "source": "by hand", "tiers": ["K8V4", "K4V2"], "tokens": 10,
    "shares": [[[0.5, 0.25], [0.125, 0.5]]], "provenance": {},
}  # fmt: skip
NESTED = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1]", "not a list"),
        ("\xff", "decode"),
        (NESTED, "recursion"),
        (GOOD | {"format": 2}, "format is 2; this version reads 1"),
        ({key: GOOD[key] for key in GOOD if key != "source"}, "lacks source"),
        (GOOD | {"alpha": 1}, "does not know alpha"),
        (GOOD | {"source": " "}, "source is ' '"),
        (GOOD | {"name": 3}, "name is 3"),
        (GOOD | {"tokens": 0}, "tokens is 0"),
        (GOOD | {"tokens": True}, "tokens is True"),
        (GOOD | {"provenance": []}, "provenance is"),
        (GOOD | {"tiers": "K8V4"}, "tiers is 'K8V4'; it must be a list"),
        (GOOD | {"tiers": ["K8V4", "K3V2"]}, "key_bits is 3"),
        (GOOD | {"tiers": ["K8V4", "K8V4"]}, "they are different"),
        (GOOD | {"tiers": ["K8V4"]}, "layer 0, head 0, are .*; there must be 1, one a tier"),
        (GOOD | {"shares": []}, r"\[layers\]\[kv_heads\]\[tiers\]"),
        (GOOD | {"shares": {"0": []}}, r"\[layers\]\[kv_heads\]\[tiers\]"),
        (GOOD | {"shares": [[]]}, "layer 0 are not"),
        (GOOD | {"shares": [[[0.5, 0.5]], [[0.5, 0.5], [0.1, 0.1]]]}, "layer 1 are not"),
        (GOOD | {"shares": [[[0.5, 0.5], 0.5]]}, "layer 0, head 1"),
        (GOOD | {"shares": [[[0.5, 0.5], [0.5]]]}, "layer 0, head 1"),
        (GOOD | {"shares": [[[0.5, 0.5], [0.75, 0.5]]]}, r"layer 0, head 1, .* add up to 1.25"),
        (GOOD | {"shares": [[[0.5, -0.125]]]}, "not negative"),
        (GOOD | {"shares": [[[0.5, float("nan")]]]}, "finite"),
        (GOOD | {"shares": [[[0.5, float("inf")]]]}, "finite"),
        (GOOD | {"shares": [[[0.5, "0.1"]]]}, "finite numbers"),
        (GOOD | {"shares": [[[True, 0]]]}, "finite numbers"),
    ],
)
def test_damaged_tables_are_refused_in_words(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("latin-1") if isinstance(text, str) else json.dumps(text).encode())
    with pytest.raises(ValueError, match=f"(?i)table of shares .*table.json.*{message}"):
        TierTable.load(path)


def test_a_name_that_leads_nowhere_says_what_is_recorded():
    with pytest.raises(ValueError, match=r"no table of shares 'llama9': neither a file nor recorded \(.*smollm2-135m"):
        tier_table("llama9")
    with pytest.raises(ValueError, match="cannot be read"):
        TierTable.load("nowhere.json")


@pytest.mark.parametrize("name", sorted(recorded_tables()))
def test_recorded_tables_are_of_whole_tokens_and_of_the_tiers_that_are_measured(name):
    table = tier_table(name).require_tiers(POLICY)
    counts = torch.tensor(table.shares, dtype=torch.float64) * table.tokens
    assert torch.allclose(counts, counts.round(), atol=1e-6)
    config = table.provenance["config"]
    assert table.tokens == config["n_texts"] * (config["n_tokens"] - config["window"])
    assert len({own for layer in table.shares for own in layer}) > 10, "heads of a real model differ"
    assert config["model"] in table.source


def test_tables_of_other_tiers_are_refused():
    with pytest.raises(ValueError, match="ours: shares are of K8V8-K4V4; the engine measures K8V4-K4V2"):
        table_of([[[0.5, 0.5]]], CompressionPolicy.paper("K8V8-K4V4").tiers).require_tiers(POLICY)


@pytest.mark.parametrize(("layers", "kv_heads"), [(3, 2), (6, 2), (1, 6), (4, 3), (1, 1), (64, 8), (7, 11)])
def test_spread_over_another_shape_keeps_the_mean_within_one_round(layers, kv_heads):
    shares = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(3)) / 2
    spread = TierReplay(shares, "by hand").spread(layers, kv_heads, "cpu")
    spread.check(layers, kv_heads, 2)
    heads, known = spread.shares.reshape(-1, 2), shares.reshape(-1, 2)
    places = [int((known == own).all(-1).nonzero()[0]) for own in heads]
    often = torch.bincount(torch.tensor(places), minlength=len(known))
    assert often.max() - often.min() <= 1, "each recorded head has its turn"
    rest = len(heads) % len(known)
    off = (heads.double().mean(0) - known.double().mean(0)).abs().max()
    assert off <= 1e-7 + rest / len(heads)
    if (layers, kv_heads) == (3, 2):
        assert torch.equal(spread.shares, shares), "of the same shape, each head keeps its own"
    assert spread.source == "by hand"


@pytest.mark.parametrize("shares", [[[[float("nan"), 0]]], [[[-0.1, 0.2]]], [[[0.9, 0.2]]], [[0.1, 0.2]], [[[]]]])
def test_a_replay_refuses_what_cannot_be_shares(shares):
    with pytest.raises(ValueError, match="shares "):
        TierReplay(torch.tensor(shares), "by hand")


def test_each_head_keeps_its_own_shares_in_both_phases():
    shape = ModelShape("tiny", "", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=50)
    shares = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.25, 0.5]]]
    policy = RULES["released"]
    weights = Weights.random(shape, max_positions=256, device="cpu", dtype=torch.float32)
    llm = LLM(weights, policy, replay=table_of(shares).replay(), max_requests=2, max_tokens=256)
    (ready,) = fast_forward(llm, [88])
    expected = torch.tensor(shares) * 80
    expected[..., 0] += WINDOW
    assert torch.equal(llm.cache.view.lengths[ready.slot].float(), expected)
    llm.add([1] * 160, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(50):
        llm.step()
    running = next(own for own in llm.scheduler.running if own.prompt_tokens == 160)
    kept = llm.cache.view.lengths[running.slot].float()
    kept[..., 0] -= WINDOW
    assert kept[0].tolist() == [[running.cached - WINDOW, 0], [0, running.cached - WINDOW]]
    assert kept[1, 0].tolist() == [0, 0]
    assert (kept[1, 1] / (running.cached - WINDOW)).tolist() == pytest.approx([0.25, 0.5], abs=0.1)
