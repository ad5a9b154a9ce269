import pytest
from tiny import tiny_llama

from diffkv_repro.models import SHAPES, ModelShape, attention_layout, shape_of
from diffkv_repro.models.shaped import random_model

PUBLISHED_KV_BYTES = {
    "llama3-8b": 131_072, "llama3.1-8b": 131_072, "qwen2.5-7b": 57_344, "qwen2.5-32b": 262_144, "qwq-32b": 262_144,
    "llama3-70b": 327_680, "smollm2-135m": 23_040,
}  # fmt: skip
PUBLISHED_PARAMETERS = {
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352, "smollm2-135m": 134_515_008, "qwen2.5-0.5b": 494_032_768,
    "r1-distill-qwen-14b": 14_770_033_664, "qwen3-235b": 235_093_634_560,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_KV_BYTES)
def test_kv_bytes_per_token(name):
    assert shape_of(name).kv_bytes_per_token() == PUBLISHED_KV_BYTES[name]


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_those_of_the_published_checkpoints(name):
    assert shape_of(name).parameters == PUBLISHED_PARAMETERS[name]


def test_parameters_and_cache_equal_a_real_model_of_the_shape():
    model = tiny_llama(heads=6, kv_heads=2, head_dim=16)
    shape = ModelShape("tiny", "", 3, 96, 96, 6, 2, 16, 97, tied_embeddings=True)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    import torch

    cache = model(torch.arange(3, 8)[None], use_cache=True).past_key_values
    stored = sum(t.nbytes for layer in cache for t in layer[:2])
    assert stored == 5 * shape.kv_bytes_per_token(bytes_per_value=4)


def test_heads_divide_and_names_are_known():
    assert all(shape.group * shape.kv_heads == shape.heads for shape in SHAPES.values())
    with pytest.raises(KeyError, match="no shape called 'gpt-5'"):
        shape_of("gpt-5")
    with pytest.raises(ValueError, match="7 heads are no multiple of 2"):
        ModelShape("odd", "", 1, 8, 8, 7, 2, 4, 10)


@pytest.mark.parametrize("name", ["llama3-8b", "qwen2.5-7b", "qwen2.5-32b", "smollm2-135m", "qwen2.5-0.5b"])
def test_random_models_have_exactly_the_shape(name):
    shape = SHAPES[name]
    model = random_model(shape, device="meta")
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    layout = attention_layout(model)
    assert (layout.heads, layout.kv_heads, layout.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)


def test_mixtures_of_experts_are_not_built():
    with pytest.raises(ValueError, match="qwen3-235b is no plain Llama or Qwen2"):
        random_model(SHAPES["qwen3-235b"], device="meta")
