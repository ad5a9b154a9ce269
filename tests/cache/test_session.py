"""Generation with a compressed cache: nothing changes where nothing is compressed, and nothing is left behind."""

import copy
import logging

import pytest
import torch
from cache_helpers import ids_of, mask_of, positions_of
from tiny import COMMON, build, tiny_gemma3, tiny_llama, tiny_qwen2
from transformers import MistralConfig, Qwen3Config

from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.diffkv import CompressionPolicy

# With tied embeddings a tiny model says its last token over and over, whatever its attention does.
UNTIED = {"tie_word_embeddings": False}
SHAPE = COMMON | UNTIED | {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama ratio 1": lambda: tiny_llama(heads=4, kv_heads=4, **UNTIED),
    "llama ratio 3": lambda: tiny_llama(heads=6, kv_heads=2, **UNTIED),
    "qwen2": lambda: tiny_qwen2(**UNTIED),
    "gemma3": lambda: tiny_gemma3(**UNTIED),
    "mistral": lambda: build(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen3": lambda: build(Qwen3Config(**SHAPE, head_dim=16)),
}
LOSSLESS = {
    "full precision": FullPrecision(),
    "K16V16": Uniform("K16V16"),
    "policy of K16V16": CompressionPolicy(("K16V16",), (0.0,), window=5),
}
LOSSY = {
    "uniform": Uniform("K8V4"),
    "paper": CompressionPolicy.paper(alpha_low=0.3, window=6),
    "released": CompressionPolicy.released(alpha_low=0.4, window=6),
}
COUNT = 12
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
BATCHES = {"one sequence": [21], "left-padded": [21, 9, 1]}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def generated(model, lengths, **way):
    ids, mask = ids_of(max(lengths), len(lengths)), mask_of(max(lengths), lengths)
    torch.manual_seed(3)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=COUNT, min_new_tokens=COUNT, pad_token_id=0, **way
    )  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_model_alone_where_nothing_is_lost(model, way, batch):
    plain = generated(model, BATCHES[batch], **WAYS[way])
    for (name, method), storage in zip(LOSSLESS.items(), ("packed", "packed", "simulated"), strict=True):
        with compress(model, method, storage=storage) as session:
            seen = generated(model, BATCHES[batch], **WAYS[way])
        assert torch.equal(seen, plain), name
        assert session.cache.columns == max(BATCHES[batch]) + COUNT - 1
        assert session.cache.reads == (COUNT - 1) * len(session.layout.layers), "answered from the cache"


def test_tokens_are_others_where_much_is_lost(model):
    plain = generated(model, [21, 9], do_sample=False)
    assert len(plain[:, 21:].unique()) > 5
    with compress(model, Uniform("K1V1")):
        assert not torch.equal(generated(model, [21, 9], do_sample=False), plain)


def state_of(model):
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return copy.deepcopy(vars(model.config)), hooks


def test_the_model_is_restored_also_after_an_exception(model):
    ids = ids_of(15)
    with torch.inference_mode():
        state, logits = state_of(model), model(ids).logits
        with compress(model, LOSSY["uniform"]):
            model(ids)
            assert state_of(model) != state
        assert state_of(model) == state
        assert torch.equal(model(ids).logits, logits)
        with pytest.raises(IndexError), compress(model, LOSSY["paper"]):
            model(ids + 10_000)
        assert state_of(model) == state
        assert torch.equal(model(ids).logits, logits)


def test_the_first_logits_are_exact(model):
    """Compression follows the attention of the prompt."""
    with torch.inference_mode():
        expected = model(ids_of(30)).logits
        with compress(model, CompressionPolicy.paper("K1V1-K1V1", alpha_low=1.0, window=1)):
            seen = model(ids_of(30)).logits
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["uniform", "paper"])
def test_nothing_of_a_request_is_left_to_the_next(model, method):
    with compress(model, LOSSY[method]) as session:
        first = generated(model, [21, 9])
        caches, sizes = [session.cache], [session.cache.kv_bytes()]
        generated(model, [40, 40, 13])
        second = generated(model, [21, 9])
        caches.append(session.cache)
        sizes.append(session.cache.kv_bytes())
        assert caches[0] is not caches[1]
        assert caches[0].kv_bytes() == sizes[0], "a finished request keeps what it had"
    assert torch.equal(first, second)
    assert sizes[0] == sizes[1]
    assert caches[0].tier_counts() == caches[1].tier_counts()


def run(model, ids, lengths, prompt, pieces):
    """Logits of what follows a prompt, fed in pieces."""
    mask = mask_of(ids.shape[1], lengths)
    at, outputs = positions_of(mask), []
    cache, stop = model(
        ids[:, :prompt], attention_mask=mask[:, :prompt], position_ids=at[:, :prompt], use_cache=True
    ).past_key_values, prompt  # fmt: skip
    for piece in pieces:
        start, stop = stop, stop + piece
        out = model(
            ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=at[:, start:stop], past_key_values=cache
        )
        outputs.append(out.logits)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("method", ["policy of K16V16", *LOSSY])
@pytest.mark.parametrize("lengths", [[33], [33, 24]])
def test_many_tokens_at_once_are_as_one_by_one(model, method, lengths):
    ids, method = ids_of(33, len(lengths)), (LOSSLESS | LOSSY)[method]
    results = []
    for pieces in ([1] * 13, [13] if len(lengths) == 1 else [4, 1, 8]):
        with torch.inference_mode(), compress(model, method) as session:
            results.append(
                (run(model, ids, lengths, 20, pieces), session.cache.tier_counts(), session.cache.kv_bytes())
            )
    for logits, tiers, size in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-3, atol=1e-3)
        assert tiers == results[0][1]
        assert size == results[0][2]


@pytest.mark.parametrize("method", ["full precision", *LOSSY])
def test_a_padded_sequence_is_as_the_same_one_alone(model, method):
    ids, method = ids_of(33, 2), (LOSSLESS | LOSSY)[method]
    with torch.inference_mode(), compress(model, method) as session:
        both = run(model, ids, [33, 24], 20, [1, 1, 4, 7])
        counts = session.cache.tier_counts()
        alone = [run(model, ids[:1], [33], 20, [1, 1, 4, 7])]
        counts_alone = [session.cache.tier_counts()]
        alone.append(run(model, ids[1:, 9:], [24], 11, [1, 1, 4, 7]))
        counts_alone.append(session.cache.tier_counts())
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-3, atol=1e-3)
    for layer, (first, second) in zip(counts, zip(*counts_alone, strict=True), strict=True):
        summed = {name: [a + b for a, b in zip(first[name], second[name], strict=True)] for name in first}
        assert layer == summed


def test_of_a_hybrid_model_the_full_layers_are_compressed_and_the_plan_says_so(caplog):
    model, method = tiny_gemma3(window=9), Uniform("K4V2")
    with caplog.at_level(logging.WARNING, "diffkv_repro"), compress(model, method) as session:
        generated(model, [21, 9])
    assert session.plan == [
        "layer 0: sliding window of 9, kept in FP16",
        "layer 1: K4V2",
        "layer 2: sliding window of 9, kept in FP16",
    ]
    assert len(caplog.records) == 1
    assert all(line in caplog.text for line in session.plan)
    kinds = [list(layer) for layer in session.cache.tier_counts()]
    assert kinds == [["K16V16"], ["K4V2"], ["K16V16"]]
    # A sliding layer holds the eight tokens before the next one; the padded sequence has seen 20 of its own.
    assert session.cache.tier_counts()[0] == {"K16V16": [16]}
    assert session.cache.tier_counts()[1] == {"K4V2": [32 + 20]}
    assert session.cache.tokens() == {"K4V2": 52, "pruned": 0}


def test_the_plan_of_a_plain_model_is_not_logged(caplog):
    with caplog.at_level(logging.WARNING, "diffkv_repro"), compress(tiny_llama(), Uniform("K4V2")) as session:
        pass
    assert session.plan == [f"layer {index}: K4V2" for index in range(3)]
    assert not caplog.records


@pytest.mark.parametrize("method", LOSSY)
def test_tokens_are_kept_or_pruned_and_none_is_forgotten(model, method):
    with compress(model, LOSSY[method]) as session:
        generated(model, [30, 17], num_beams=2)
        cache = session.cache
    full = [layer for layer in session.layout.layers if layer.kind == "full"]
    # Two beams of each sequence; the last token has been chosen and not been seen.
    seen = 2 * (30 + 17 + 2 * (COUNT - 1)) * session.layout.kv_heads * len(full)
    assert sum(cache.tokens().values()) == seen
    assert all(count >= 0 for count in cache.tokens().values())
    size = cache.kv_bytes()
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors()]
    sliding = sum(layer.kv_bytes(cache.rows).total for layer in cache.layers if not layer.tensors())
    assert size.total == sum(tensor.nbytes for tensor in tensors) + sliding
