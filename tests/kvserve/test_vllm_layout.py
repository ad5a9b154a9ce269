"""Paged caches in the orders of GPUs and CPUs: what is read is what the model computed, and nothing else is touched."""

import pytest
import torch
from tiny import tiny_llama

from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.vllm_layout import PagedLayer, in_model_order, kernel_order


def gpu_store(key, value, cache, slot_mapping):
    """A slot holds its key and then its value."""
    slots = cache.shape[2]
    cache[slot_mapping // slots, :, slot_mapping % slots] = torch.cat([key, value], dim=-1)


def cpu_store(key, value, cache, slot_mapping):
    """In a block and head, keys [head_dim, slots] and then values [slots, head_dim], as vLLM's kernels for x86."""
    blocks, heads, slots, width = cache.shape
    flat = cache.view(blocks, heads, 2, slots * width // 2)
    for k, v, slot in zip(key, value, slot_mapping.tolist(), strict=True):
        block, offset = divmod(slot, slots)
        flat[block, :, 0].view(heads, width // 2, slots)[:, :, offset] = k
        flat[block, :, 1].view(heads, slots, width // 2)[:, offset] = v


def pairs_store(key, value, cache, slot_mapping):
    """Keys of two neighbouring channels side by side, as kernels with matrix units want them."""
    blocks, heads, slots, width = cache.shape
    flat = cache.view(blocks, heads, 2, slots * width // 2)
    for k, v, slot in zip(key, value, slot_mapping.tolist(), strict=True):
        block, offset = divmod(slot, slots)
        flat[block, :, 0].view(heads, width // 4, slots, 2)[:, :, offset] = k.unflatten(1, (width // 4, 2))
        flat[block, :, 1].view(heads, slots, width // 2)[:, offset] = v


STORES = {"gpu": gpu_store, "cpu": cpu_store, "pairs": pairs_store}


def filled(store, kv, blocks, slots, order=True):
    """A cache in which a kernel has put ``kv`` [heads, tokens, dim] x 2 at ``blocks``; other numbers are noise."""
    heads, tokens, dim = kv.key.shape
    cache = torch.randn(max(blocks) + 2, heads, slots, 2 * dim).to(kv.key.dtype)
    at = torch.tensor([blocks[token // slots] * slots + token % slots for token in range(tokens)])
    store(kv.key.transpose(0, 1), kv.value.transpose(0, 1), cache, at)
    found = kernel_order(store, heads, slots, dim, cache.dtype) if order else None
    return PagedLayer(cache, found)


def random_kv(heads=3, tokens=50, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return LayerKV(*(torch.randn(heads, tokens, dim, generator=generator).to(dtype) for _ in "kv"))


def equal(a, b):
    return torch.equal(a.key, b.key) and torch.equal(a.value, b.value)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_what_a_kernel_stored_is_read(store, dtype, tokens):
    kv = random_kv(tokens=tokens, dtype=dtype)
    layer = filled(STORES[store], kv, [5, 0, 3, 7], 16)
    assert equal(layer.read([5, 0, 3, 7], tokens), kv)


def test_the_order_of_gpus_needs_no_asking():
    kv = random_kv()
    assert equal(filled(gpu_store, kv, [2, 9, 4, 1], 16, order=False).read([2, 9, 4, 1], 50), kv)


@pytest.mark.parametrize("store", [*STORES, "plain"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 50), (16, 50), (32, 33), (5, 50), (0, 1), (48, 64)])
def test_a_write_is_what_the_kernel_would_have_stored(store, start, tokens):
    kernel, blocks = STORES.get(store, gpu_store), [5, 0, 3, 7]
    old, new = random_kv(tokens=64, seed=1), random_kv(tokens=tokens, seed=2)
    layer = filled(kernel, old, blocks, 16, order=store != "plain")
    want = layer.tensor.clone()
    at = torch.tensor([blocks[token // 16] * 16 + token % 16 for token in range(start, tokens)])
    kernel(new.key[:, start:].transpose(0, 1), new.value[:, start:].transpose(0, 1), want, at)
    layer.write(blocks, new, start)
    assert torch.equal(layer.tensor, want)


@pytest.mark.parametrize("store", STORES)
def test_it_is_the_cache_that_transformers_has(store):
    model = tiny_llama(heads=6, kv_heads=2, head_dim=16)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    for key, value, *_ in cache:
        layer = filled(STORES[store], LayerKV(key[0], value[0]), [1, 4, 2], 16)
        found = layer.read([1, 4, 2], ids.shape[1])
        assert torch.equal(found.key, key[0])
        assert torch.equal(found.value, value[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_on_a_gpu_are_read_and_written(dtype):
    kv, new = random_kv(dtype=dtype), random_kv(tokens=40, dtype=dtype, seed=2)
    layer = PagedLayer(filled(gpu_store, kv, [2, 9, 4, 1], 16, order=False).tensor.cuda())
    assert equal(layer.read([2, 9, 4, 1], 50), kv)
    layer.write([2, 9, 4, 1], new, 16)
    found = layer.read([2, 9, 4, 1], 50)
    assert torch.equal(found.key, torch.cat([kv.key[:, :16], new.key[:, 16:], kv.key[:, 40:]], dim=1))


def test_a_kernel_that_loses_numbers_is_found_out():
    def forgetful(key, value, cache, slot_mapping):
        gpu_store(key, value, cache, slot_mapping)
        cache[..., 3] = 0

    def by_head(key, value, cache, slot_mapping):
        (cpu_store if key.shape[1] == 1 else gpu_store)(key, value, cache, slot_mapping)
        cache[:, 1:] = cache[:, 1:].flip(2)

    for store in (forgetful, by_head):
        with pytest.raises(ValueError, match="permutation"):
            kernel_order(store, 2, 16, 8, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((4, 16, 8), torch.float16, "supported are"),
        ((4, 2, 16, 7), torch.float16, "supported are"),
        ((4, 2, 16, 8), torch.uint8, "unquantised"),
        ((4, 2, 16, 8), torch.float8_e4m3fn, "unquantised"),
    ],
)
def test_other_caches_are_refused(shape, dtype, words):
    with pytest.raises(ValueError, match=words):
        PagedLayer(torch.zeros(shape).to(dtype))


def test_blocks_that_are_not_there_are_refused():
    layer = PagedLayer(torch.zeros(4, 2, 16, 8))
    for blocks, tokens in (([0], 17), ([0], 0), ([9], 3), ([-1], 3), ([], 1)):
        with pytest.raises(ValueError, match="asked for"):
            layer.read(blocks, tokens)
    with pytest.raises(ValueError, match="no permutation"):
        PagedLayer(torch.zeros(4, 2, 16, 8), torch.zeros(128, dtype=torch.int64))


def test_layers_come_in_the_models_order_and_once():
    caches = {f"model.layers.{index}.attn": torch.zeros(2, 1, 16, 8) + index for index in (10, 2, 0)}
    caches["model.layers.11.attn"] = caches["model.layers.2.attn"]
    assert [int(cache.mean()) for cache in in_model_order(caches)] == [0, 2, 10]
    with pytest.raises(ValueError, match="alike"):
        in_model_order(caches | {"model.layers.3.attn": torch.zeros(2, 2, 16, 8)})
    with pytest.raises(ValueError, match="nothing to transfer"):
        in_model_order({})
