"""What is kept of a text, and what a policy's effect on it is, against running the model."""

import pytest
import torch
from explore_helpers import OTHER_WORDS, WORDS

from diffkv_repro.baselines import baseline
from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.evaluation.teacher_forced import continued
from diffkv_repro.explore import coloured_text, draw_policy, effect_of, measured_agreement, observe
from diffkv_repro.explore.facts import bytes_apart, update_cost
from diffkv_repro.models.hf import intercept_attention

LOSSY = CompressionPolicy.paper("K4V2-K2V2", alpha_high=3, alpha_low=0.5, window=5)


@pytest.fixture
def statistics(loaded):
    return observe(loaded, WORDS, observed=6, limit=70)


def test_a_text_is_observed_once(loaded, statistics):
    assert observe(loaded, WORDS, observed=6, limit=70) is statistics
    assert observe(loaded, OTHER_WORDS, observed=6, limit=70) is not statistics
    assert observe(loaded, WORDS, observed=5, limit=70) is not statistics
    assert len(statistics.tokens) == 64
    assert list(statistics.tokens) == WORDS.split()[:64]


def test_the_outputs_and_margins_are_those_of_the_model(loaded, statistics):
    ids = loaded.tokenizer(WORDS, return_tensors="pt").input_ids[:, :70]
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids).logits[0, -6:]
    top = logits.topk(2, dim=-1).values
    torch.testing.assert_close(statistics.margins, top[:, 0] - top[:, 1], rtol=1e-4, atol=1e-4)


def test_slopes_are_the_derivatives_of_the_margins(loaded, statistics):
    """A small change of one layer's output changes the margins as its slopes say: finite differences."""
    generator = torch.Generator().manual_seed(3)
    layer, size = 1, 1e-2
    change = size * torch.randn(statistics.outputs[layer].shape, generator=generator)
    ids = loaded.tokenizer(WORDS, return_tensors="pt").input_ids[:, :70]

    def changed(sign):
        def attend(call):
            output = torch.nn.functional.scaled_dot_product_attention(
                call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=True
            )
            if call.layer == layer:
                output = output.clone()
                output[:, :, -6:] += sign * change
            return output

        with torch.inference_mode(), intercept_attention(loaded.model, attend):
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0, -6:]
        places = plain_top
        return logits.gather(1, places[:, :1])[:, 0] - logits.gather(1, places[:, 1:])[:, 0]

    with torch.inference_mode():
        plain_top = loaded.model(input_ids=ids).logits[0, -6:].topk(2, dim=-1).indices
    measured = (changed(1) - changed(-1)) / 2
    predicted = (statistics.slopes[layer] * change).flatten(1).sum(dim=1)
    torch.testing.assert_close(predicted, measured, rtol=0.05, atol=0.02 * float(measured.abs().max()))


def test_nothing_is_lost_where_nothing_is_compressed(statistics):
    effect = effect_of(statistics, Uniform("K16V16"))
    assert float(effect.errors.max()) < 1e-3
    assert effect.agreement == 1.0
    assert effect.shares == {"K16V16": 1.0, "pruned": 0.0}


@pytest.mark.parametrize(
    "policy", [LOSSY, CompressionPolicy.released("K8V4-K4V2", alpha_high=2, alpha_low=0.3, window=9)]
)
def test_tiers_and_bytes_are_those_of_the_cache_in_use(loaded, statistics, policy):
    effect = effect_of(statistics, policy)
    ids = statistics.prefilled.input_ids[:, : statistics.prefilled.tokens]
    with torch.inference_mode(), compress(loaded.model, policy, storage="packed") as session:
        loaded.model(input_ids=ids, use_cache=True)
        cache = session.cache
        tiers = torch.cat([layer.store.tier for layer in cache.layers])
        assert torch.equal(effect.tiers, tiers)
        assert effect.size == cache.kv_bytes()
    assert bytes_apart(statistics, policy) == 0
    assert sum(effect.shares.values()) == pytest.approx(1)
    table = effect.bytes_table()["bytes"]
    assert table["true: everything"] == table.iloc[:-3].sum() == effect.size.total


def test_the_error_of_the_first_layer_is_that_of_decoding_through_the_cache(loaded, statistics):
    """In the first layer queries do not depend on the cache: there the prediction must be exact."""
    method = Uniform("K4V2")
    effect = effect_of(statistics, method)
    seen = {}
    with torch.inference_mode(), compress(loaded.model, method, storage="simulated") as session:
        cache = session.new_cache()
        cache.admit(statistics.prompts, statistics.rows)
        layer = cache.layers[0]
        decode = layer.decode
        layer.decode = lambda call, rows: seen.setdefault("output", decode(call, rows))
        loaded.model(input_ids=statistics.prefilled.input_ids[:, -6:], past_key_values=cache.hf, use_cache=True)
    exact = statistics.outputs[0]
    error = float((seen["output"] - exact).norm() / exact.norm())
    assert float(effect.errors[0]) == pytest.approx(error, rel=1e-4)


def test_the_measured_agreement_is_that_of_teacher_forced_decoding(loaded, statistics):
    reference = continued(loaded.model, statistics.prefilled, FullPrecision(), "packed")[0].argmax(-1)
    found = continued(loaded.model, statistics.prefilled, LOSSY, "packed")[0].argmax(-1)
    assert measured_agreement(statistics, [LOSSY, FullPrecision()]) == [
        pytest.approx(float((found == reference).float().mean())), 1.0,
    ]  # fmt: skip


def test_only_full_layers_are_compressed(sliding):
    statistics = observe(sliding, WORDS, observed=5, limit=50)
    effect = effect_of(statistics, LOSSY)
    assert effect.layers == (1,)
    assert effect.tiers.shape == (1, 1, 45)
    assert bytes_apart(statistics, LOSSY) == 0
    assert draw_policy(effect).data


def test_an_update_is_cheap(statistics):
    assert 0 < update_cost(statistics, LOSSY, repeats=1) < 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observed": 0}, "observed is 0; allowed are 1 to 64"),
        ({"limit": 11, "observed": 6}, "limit is 11 tokens"),
        ({"limit": 300}, "limit is 300 tokens; with 16 observed, allowed are 32 to 256"),
    ],
)
def test_what_cannot_be_observed_is_refused(loaded, options, message):
    with pytest.raises(ValueError, match=message):
        observe(loaded, WORDS, **options)


@pytest.mark.parametrize("text", ["", " ", "w3 w4", "\x00"])
def test_a_text_that_is_too_short_is_refused(loaded, text):
    with pytest.raises(ValueError, match=r"the text has \d tokens; at least 12 are needed"):
        observe(loaded, text, observed=6, limit=70)


def test_a_method_without_tiers_is_refused(statistics):
    with pytest.raises(ValueError, match="not in tiers"):
        effect_of(statistics, baseline("kivi")(bits=2))


def test_the_coloured_text_is_the_text_and_nothing_of_it_is_markup(loaded, statistics):
    effect = effect_of(statistics, LOSSY)
    for layer, head in ((None, None), (0, None), (2, 1)):
        shown = coloured_text(effect, layer, head)
        assert shown.count("<span title=") == len(statistics.tokens)
    one = coloured_text(effect, 2, 1)
    for name, count in (
        ("K4V2", int((effect.tiers[2, 1] == 0).sum())),
        ("pruned", int((effect.tiers[2, 1] < 0).sum())),
    ):
        assert one.count(f'title="{name}"') == count
    object.__setattr__(statistics, "tokens", ("<script>alert(1)</script>", *statistics.tokens[1:]))
    assert "<script" not in coloured_text(effect)
    with pytest.raises(ValueError, match="layer is 7; allowed are 0, 1, 2"):
        coloured_text(effect, 7)
