"""The profiles measured from the ground floor: decoded values, true bytes, plausible speeds."""

import pytest
import torch
from tiny import tiny_llama

from diffkv_repro.kvserve.packed import CODECS, Fp8, Levels, keys_and_values, measure


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 37, 16, generator=generator).half() for _ in range(2)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_is_sent_decodes_to_within_a_step(codec, tensors):
    back = codec.decode(codec.encode(tensors))
    for before, after in zip(tensors, back, strict=True):
        assert (after.dtype, after.shape) == (torch.float16, before.shape)
        span = (before.max() - before.min()).item()
        step = 0.15 * span if isinstance(codec, Fp8) else 0.51 * span / (codec.levels - 1)
        assert (after - before).abs().max().item() <= step


@pytest.mark.parametrize("levels", [2, 3, 5, 16, 256])
def test_coders_agree_on_the_values(levels, tensors):
    ways = [Levels(levels, coder) for coder in ("packed", "Huffman", "bzip2")]
    decoded = [way.decode(way.encode(tensors)) for way in ways]
    for other in decoded[1:]:
        assert all(torch.equal(a, b) for a, b in zip(decoded[0], other, strict=True))


def test_bytes_count_scales_and_zero_points(tensors):
    keys, values = tensors
    metadata = 4 * (2 * 3 * 16 + 2 * 3 * 37)
    assert Levels(16).sent_bytes(Levels(16).encode(tensors)) == (keys.numel() + values.numel()) // 2 + metadata
    profile, other = measure([Levels(16), Fp8()], tensors, repeats=2)
    assert other.ratio == 2
    raw = 2 * (keys.numel() + values.numel())
    assert profile.ratio == pytest.approx(raw / (raw / 4 + metadata))
    assert profile.quality_of("any") == 0, "no task was run"


def test_the_cache_of_a_prompt():
    model = tiny_llama()
    keys, values = keys_and_values(model, torch.arange(1, 20)[None])
    config = model.config
    shape = (config.num_hidden_layers, config.num_key_value_heads, 19, config.head_dim)
    assert keys.shape == values.shape == shape
    assert keys.dtype == torch.float16


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="levels is 1; allowed are 2 to 256"):
        Levels(1)
    with pytest.raises(ValueError, match="coder is 'zip'; allowed are packed, Huffman, bzip2"):
        Levels(4, "zip")
