"""What a session cannot do it says, and odd input gives what the model alone gives."""

import pytest
import torch
from cache_helpers import ids_of, mask_of, positions_of
from tiny import COMMON, build, tiny_llama, tiny_qwen2
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    MistralConfig,
    StaticCache,
)

from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.models import UnsupportedAttention
from diffkv_repro.models.hf_cache import cache_argument, left_padding

METHODS = {
    "full precision": FullPrecision(),
    "uniform": Uniform("K8V4"),
    "policy": CompressionPolicy.paper(alpha_low=0.3, window=4),
}


@pytest.fixture(scope="module")
def model():
    # With tied embeddings a tiny model says its last token over and over, whatever its attention does.
    return tiny_llama(tie_word_embeddings=False)


@pytest.fixture(params=METHODS)
def session(model, request):
    with torch.inference_mode(), compress(model, METHODS[request.param]) as session:
        yield session


def test_a_prompt_beyond_the_context_is_refused(model, session):
    with pytest.raises(ValueError, match="257 tokens are more than the model's context of 256"):
        model(ids_of(257))
    assert model(ids_of(256)).logits.shape[1] == 256
    with pytest.raises(ValueError, match="257 tokens are more than the model's context of 256"):
        model(ids_of(1), past_key_values=session.cache.hf)


def test_an_empty_prompt_is_refused(model, session):
    with pytest.raises(ValueError, match="an empty prompt: at least one token is needed"):
        model(ids_of(3)[:, :0])
    with pytest.raises(ValueError, match="an empty prompt"):
        model.generate(ids_of(3)[:, :0], max_new_tokens=3)


def test_a_prompt_of_one_token(model, session):
    seen = model(ids_of(1)).logits
    more = model(ids_of(1, seed=1), past_key_values=session.cache.hf).logits
    assert bool(torch.isfinite(seen).all() and torch.isfinite(more).all())
    assert session.cache.columns == 2
    assert sum(session.cache.tokens().values()) == 2 * 2 * 3
    assert session.cache.tokens()["pruned"] == 0


MASKS = {
    "a hole": ([[1, 1, 0, 1, 1]], "hides tokens after others; only padding on the left is supported"),
    "padding on the right": ([[1, 1, 1, 0, 0]], "hides tokens after others"),
    "nothing but padding": ([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], "hides a whole sequence: every prompt needs"),
    "too short": ([[1, 1, 1, 1]], r"attention_mask is \(1, 4\); it must be \[batch, 5\]"),
    "too long": ([[1, 1, 1, 1, 1, 1]], r"attention_mask is \(1, 6\); it must be \[batch, 5\]"),
    "one a pair of tokens": (torch.ones(1, 1, 5, 5).tolist(), r"attention_mask is \(1, 1, 5, 5\)"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_a_cache_has_no_place_for_are_refused(model, session, name):
    mask, message = MASKS[name]
    with pytest.raises(ValueError, match=message):
        model(ids_of(5, len(mask)), attention_mask=torch.tensor(mask))
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=message):
            model(ids_of(5, len(mask)), attention_mask=torch.tensor(mask), use_cache=use_cache)


def test_a_mask_in_generation_covers_what_has_been_seen(model, session):
    model(ids_of(9))
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 1\); it must be \[batch, 10\]"):
        model(ids_of(1), past_key_values=session.cache.hf, attention_mask=torch.ones(1, 1))


def test_padding_is_remembered_where_no_mask_follows(model, session):
    mask, ids = mask_of(12, [12, 7]), ids_of(13, 2)
    at = positions_of(mask_of(13, [13, 8]))
    results = []
    for later in (None, mask_of(13, [13, 8])):
        model(ids[:, :12], attention_mask=mask, position_ids=at[:, :12])
        cache = session.cache
        results.append(
            model(ids[:, 12:], attention_mask=later, position_ids=at[:, 12:], past_key_values=cache.hf).logits
        )
    assert torch.equal(*results)
    # (12 and 7 tokens of the prompt and one each) x KV heads x layers
    assert sum(cache.tokens().values()) == 21 * 2 * 3


REORDERED = {
    "full precision": FullPrecision(),
    "bias-free": Uniform("K8V4", bias_free=True),
    "policy, bias-free": CompressionPolicy.paper(alpha_low=0.3, window=4, bias_free=True),
}


@pytest.mark.parametrize("method", REORDERED)
def test_sequences_in_another_order_go_on_as_if_they_had_come_in_it(method):
    model, lengths, order = tiny_qwen2(tie_word_embeddings=False), [20, 13, 5], torch.tensor([2, 0, 2, 1])
    mask, ids = mask_of(21, [length + 1 for length in lengths]), ids_of(21, 3)
    at, results = positions_of(mask), []
    with torch.inference_mode(), compress(model, REORDERED[method]) as session:
        for first, then in ((slice(None), order), (order, slice(None))):
            model(ids[first, :20], attention_mask=mask[first, :20], position_ids=at[first, :20])
            cache = session.cache
            if first is not order:
                cache.hf.reorder_cache(order)
                assert cache.kv_bytes().full == 4 * 16 * 2 * 3 * (5 + 20 + 5 + 13)
            rest = ids[first][then][:, 20:], at[first][then][:, 20:]
            logits = model(rest[0], position_ids=rest[1], past_key_values=cache.hf).logits
            results.append((logits, cache.tier_counts(), cache.kv_bytes().full))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    assert results[0][1:] == results[1][1:]


def test_a_filled_cache_of_another_kind_is_refused(model, session):
    filled = DynamicCache()
    for layer in range(3):
        filled.update(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16), layer)
    with pytest.raises(ValueError, match="a DynamicCache with 4 tokens; inside compress"):
        model(ids_of(3), past_key_values=filled)
    static = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="was given a StaticCache"):
        model(ids_of(3), past_key_values=static)


@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=tiny_llama().config)])
def test_an_empty_cache_of_the_model_is_taken_over(model, session, make):
    given = make()
    out = model(ids_of(9), past_key_values=given)
    assert out.past_key_values is given
    more = model(ids_of(1), past_key_values=given).logits
    expected = model(ids_of(9), past_key_values=session.new_cache().hf).past_key_values
    assert torch.equal(model(ids_of(1), past_key_values=expected).logits, more)


def test_an_unknown_storage_is_refused(model):
    message = "unknown storage 'disk'; allowed are simulated, packed"
    with pytest.raises(ValueError, match=message), compress(model, FullPrecision(), storage="disk"):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e8])
@pytest.mark.parametrize("storage", ["packed", "simulated"])
@pytest.mark.parametrize("method", [Uniform("K8V4"), Uniform("K16V16"), CompressionPolicy.paper(window=4)])
def test_keys_that_half_precision_cannot_hold_are_refused(method, storage, value):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = value
        with compress(model, method, storage=storage), pytest.raises(ValueError, match="a value to quantise is"):
            model(ids_of(9))
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = 0
        with compress(model, method, storage=storage) as session:
            model(ids_of(9))
        assert session.cache.columns == 9, "the next request is a new one"


def test_the_cache_is_found_under_both_names():
    one, other = object(), object()
    assert cache_argument({"past_key_values": one}) == "past_key_values"
    assert cache_argument({"cache": other}) == "cache"
    assert cache_argument({"input_ids": None, "cache": None}) == "cache"
    assert cache_argument({"input_ids": None}) == "past_key_values"


def test_left_padding_counts_columns():
    assert left_padding(None, 5) is None
    assert left_padding(torch.ones(2, 5), 5) is None
    assert left_padding(mask_of(5, [5, 2, 1]), 5).tolist() == [0, 3, 4]
    assert left_padding(mask_of(5, [3]).bool(), 5).tolist() == [2]


def tiny_bart():
    torch.manual_seed(0)
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return BartForConditionalGeneration(BartConfig(**shape, **sizes, max_position_embeddings=64))


@pytest.mark.parametrize("method", METHODS)
def test_models_with_nothing_to_compress_are_refused(method):
    with pytest.raises(UnsupportedAttention, match="encoder-decoder"), compress(tiny_bart(), METHODS[method]):
        pytest.fail("the block was entered")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mistral = build(MistralConfig(**COMMON, **shape, sliding_window=8))
    message = "every layer of MistralForCausalLM slides over 8 tokens"
    with pytest.raises(UnsupportedAttention, match=message), compress(mistral, METHODS[method]):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Uniform("K4V2:5/1"), "5 key groups do not divide a head_dim of 16"),
        (CompressionPolicy(alphas=(((1.0, 1.0),), 0.0)), "alphas are for 1 layers of"),
    ],
)
def test_methods_that_do_not_fit_are_refused_before_anything_runs(model, method, message):
    with pytest.raises(ValueError, match=message), compress(model, method):
        pytest.fail("the block was entered")


def test_generation_that_takes_tokens_back_is_refused(model, session):
    ids = ids_of(12).repeat(1, 2)
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        model.generate(ids, prompt_lookup_num_tokens=4, max_new_tokens=20, do_sample=False, pad_token_id=0)
    helper = tiny_qwen2(tie_word_embeddings=False)
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        model.generate(ids, assistant_model=helper, max_new_tokens=20, do_sample=False, pad_token_id=0)


def test_what_a_compressed_cache_cannot_do_it_refuses(model, session):
    model(ids_of(9))
    layer = session.cache.hf.layers[0]
    for action in (lambda: layer.crop(-2), lambda: layer.crop(3), layer.reset, layer.offload):
        with pytest.raises(NotImplementedError):
            action()
    with pytest.raises(NotImplementedError, match="repeat the inputs instead"):
        layer.batch_repeat_interleave(2)
    layer.crop(0)
    assert session.cache.columns == 9


def test_a_cache_goes_on_in_the_next_turn(model):
    ids, more = ids_of(20), ids_of(5, seed=1)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    turns = [model.generate(ids, **options)]
    turns.append(model.generate(torch.cat([turns[0], more], dim=1), **options))
    with compress(model, FullPrecision()) as session:
        first = model.generate(ids, **options)
        cache = session.cache
        second = model.generate(torch.cat([first, more], dim=1), past_key_values=cache.hf, **options)
        assert session.cache is cache
    assert torch.equal(first, turns[0])
    assert torch.equal(second, turns[1])


def test_without_a_cache_nothing_is_compressed(model, session):
    ids = ids_of(20, 2)
    mask = mask_of(20, [20, 11])
    seen = model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False)
    assert session.cache is None
    assert seen.past_key_values is None


def test_a_plain_call_needs_no_inference_mode(model):
    ids, method = ids_of(20), METHODS["policy"]
    with torch.inference_mode(), compress(model, method) as session:
        model(ids)
        expected = model(ids_of(1), past_key_values=session.cache.hf).logits
    with compress(model, method) as session:
        model(ids)
        seen = model(ids_of(1), past_key_values=session.cache.hf).logits
    torch.testing.assert_close(seen, expected)


def test_of_blocks_in_each_other_the_inner_method_counts_or_is_refused(model):
    with torch.inference_mode(), compress(model, FullPrecision()):
        try:
            with compress(model, Uniform("K2V2")) as inner:
                model(ids_of(9))
        except (ValueError, RuntimeError):
            return
    assert set(inner.cache.tokens()) == {"K2V2", "pruned"}


def test_a_cache_is_not_used_outside_its_block(model):
    """The model alone would attend over the newest token only, without a word."""
    with torch.inference_mode():
        with compress(model, FullPrecision()) as session:
            model(ids_of(9))
        with pytest.raises((ValueError, RuntimeError)):
            model(ids_of(1), past_key_values=session.cache.hf)
