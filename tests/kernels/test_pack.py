"""Partition, classification and packing of a prompt: the bytes of the twins, whatever the shape."""

import pytest
import torch
from diffkv_repro.kernels.pack import pack_triton
from diffkv_repro.kernels.partition import partition_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_helpers import DEVICE, empty_view, mixed_tiers, random_rows

from diffkv_repro.diffkv import paged_ops, reference
from diffkv_repro.diffkv.paged_view import KeyBias, PagedRule

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 257, 4097])
@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_partition_is_the_twin_s(tokens, tiers):
    tier = mixed_tiers(2, 3, tokens, tiers, seed=tokens)
    tier[0, 1] = -1
    tier[1, 0] = tiers - 1
    for seen, expected in zip(partition_triton(tier, tiers), reference.partition(tier, tiers), strict=True):
        assert torch.equal(seen, expected)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 70), short=st.integers(0, 70), tiers=st.integers(1, 3), window=st.integers(1, 80),
    observed=st.sampled_from([0, 1, 16, 64]), own=st.booleans(), by_position=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_classification_is_the_twin_s(tokens, short, tiers, window, observed, own, by_position, seed):
    generator = torch.Generator().manual_seed(seed)
    # Few different values: many lie exactly on a threshold.
    sums = torch.randint(0, 9, (2, 2, tokens), generator=generator).float().to(DEVICE)
    alphas = torch.randint(0, 9, (1, tiers, 2), generator=generator).float().sort(dim=1, descending=True).values
    rule = PagedRule(alphas.to(DEVICE), window, observed, own, by_position, False, "algorithm-1")
    lengths = torch.tensor([tokens, min(short, tokens)], dtype=torch.int32, device=DEVICE)
    expected = reference.classify(sums, lengths, rule, layer=0)
    assert torch.equal(paged_ops.classify(sums, lengths, rule, layer=0), expected)
    seen = paged_ops.classify_and_partition(sums, lengths, rule, layer=0)
    for found, twin in zip(seen, (expected, *reference.partition(expected, tiers)), strict=True):
        assert torch.equal(found, twin)


def both(key, value, tiers, tier, *, bias=None, positions=None, requests=None):
    """Pool as the twin leaves it on the CPU and as the kernel leaves it on the device."""
    batch, kv_heads, tokens, head_dim = key.shape
    rows = torch.arange(batch - 1, -1, -1, dtype=torch.int32) if requests is None else requests
    slots, _ = reference.partition(tier, len(tiers.split()))
    scores = torch.rand(tier.shape, generator=torch.Generator().manual_seed(3))
    pools = []
    for operation, device in ((reference.pack, torch.device("cpu")), (pack_triton, DEVICE)):
        view = empty_view(
            tiers, head_dim=head_dim, requests=batch, kv_heads=kv_heads, entries=2 * (-(-tokens // 7) + 2),
            device=device,
        )  # fmt: skip
        own = bias and KeyBias(bias.bias.to(device), bias.table.to(device))
        given = {"layer": 1, "bias": own, "positions": None if positions is None else positions.to(device)}
        operation(view, *(part.to(device) for part in (key, value, tier, slots, scores, rows)), **given)
        pools.append(view.pool.cpu())
    return pools


SHAPES = [
    ("K8V4 K4V2", 64, 65, torch.float32), ("K8V4 K4V2", 128, 63, torch.float16), ("K4V8 K2V4", 80, 1, torch.float32),
    ("K8V2 K2V1", 96, 64, torch.bfloat16), ("K4V2:2/4 K16V16", 64, 33, torch.bfloat16),
    ("K16V4 K1V8", 80, 33, torch.float16), ("K8V4 K4V2 K2V2", 128, 33, torch.float32),
    ("K8V8 K16V1", 256, 33, torch.float16), ("K1V1:4/2", 128, 33, torch.float32), ("K4V2", 16, 257, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("tiers", "head_dim", "tokens", "dtype"), SHAPES)
def test_pages_are_the_twin_s_byte_for_byte(tiers, head_dim, tokens, dtype):
    """Constant rows, rows of zeros, narrow and tiny ranges and the ends of FP16 are among the rows."""
    key, value = (random_rows(2, 2, tokens, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    if dtype == torch.bfloat16:  # 65504 rounds up there, beyond FP16
        key, value = key.clamp(-65280, 65280), value.clamp(-65280, 65280)
    tier = mixed_tiers(2, 2, tokens, len(tiers.split()), lengths=[tokens, tokens // 2])
    twin, kernel = both(key, value, tiers, tier)
    assert torch.equal(twin, kernel)


def test_strides_positions_and_absent_requests():
    key = random_rows(2, 40, 2, 64, seed=1).transpose(1, 2)
    value = random_rows(2, 2, 40, 128, seed=2)[..., ::2]
    tier = mixed_tiers(2, 2, 40, 2)
    positions = torch.randint(0, 9999, (2, 40), dtype=torch.int32, device=DEVICE)
    requests = torch.tensor([-1, 0], dtype=torch.int32, device=DEVICE)
    twin, kernel = both(key, value, "K8V4 K4V2", tier, positions=positions, requests=requests)
    assert torch.equal(twin, kernel)
    assert bool((kernel != 0xFF).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_lose_their_bias(dtype):
    key, value = (torch.randn(1, 2, 20, 80, dtype=dtype, device=DEVICE) for _ in range(2))
    tier = mixed_tiers(1, 2, 20, 2)
    bias = KeyBias(10 * torch.randn(2, 2, 80, device=DEVICE), torch.randn(20, 80, device=DEVICE))
    twin, kernel = both(key, value, "K16V8 K8V4", tier, bias=bias)
    if DEVICE.type == "cpu":
        assert torch.equal(twin, kernel)
    else:  # where the device fuses product and sum, the last bit may differ
        assert float((twin != kernel).float().mean()) < 1e-2
