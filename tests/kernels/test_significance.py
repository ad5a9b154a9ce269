"""Scores that prompt tokens receive, against the attention statistics of the rest of the package."""

import pytest
import torch
from diffkv_repro.kernels.significance import significance_triton
from paged_helpers import DEVICE, assert_close

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.diffkv import reference_attention

pytestmark = pytest.mark.usefixtures("poisoned")
RULES = [Significance(), Significance("last", 64, own_score=True), Significance("last", 10)]
SHAPES = [
    (1, 64, 3, torch.float16), (63, 80, 1, torch.float32), (64, 64, 2, torch.float16), (65, 96, 8, torch.bfloat16),
    (257, 128, 4, torch.float16), (40, 256, 7, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=["later", "last 64 with own", "last 10"])
@pytest.mark.parametrize(("tokens", "head_dim", "group", "dtype"), SHAPES)
def test_significance_is_the_twin_s(tokens, head_dim, group, dtype, rule):
    generator = torch.Generator().manual_seed(tokens)

    def normal(heads):
        return torch.randn(2, heads, tokens, head_dim, generator=generator).to(dtype).to(DEVICE)

    query, key = 2 * normal(2 * group), normal(2)
    lengths = torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=DEVICE)
    options = {"scale": head_dim**-0.5, "lengths": lengths}
    expected = reference_attention.significance(query.double(), key.double(), rule, **options)
    observed = rule.observed if rule.queries == "last" else 0
    seen = significance_triton(query, key, observed=observed, own_score=rule.own_score, **options)
    assert_close("sums", seen, expected, 1e-4)
    # What little tokens get matters as much: it decides what is pruned.
    torch.testing.assert_close(seen.double(), expected.double(), rtol=2e-3, atol=1e-8)


def test_any_strides_and_blocks():
    query = torch.randn(1, 50, 4, 64, device=DEVICE).transpose(1, 2)
    key = torch.randn(1, 50, 2, 64, device=DEVICE).transpose(1, 2)
    lengths = torch.tensor([50], dtype=torch.int32, device=DEVICE)
    expected = reference_attention.significance(query, key, Significance(), scale=0.125, lengths=lengths)
    for block in ((16, 32), (32, 16)):
        seen = significance_triton(query, key, observed=0, own_score=False, scale=0.125, lengths=lengths, block=block)
        assert_close("sums", seen, expected, 1e-4)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_the_keys_give_the_same_sums(parts):
    """With more parts than blocks of keys some parts are empty."""
    query, key = torch.randn(2, 4, 70, 64, device=DEVICE), torch.randn(2, 2, 70, 64, device=DEVICE)
    lengths = torch.tensor([70, 9], dtype=torch.int32, device=DEVICE)
    for rule in (Significance("last", 8, own_score=True), Significance()):
        expected = reference_attention.significance(query, key, rule, scale=0.125, lengths=lengths)
        seen = significance_triton(
            query, key, observed=rule.observed if rule.queries == "last" else 0, own_score=rule.own_score, scale=0.125,
            lengths=lengths, block=(16, 16), parts=parts,
        )  # fmt: skip
        assert_close("sums", seen, expected, 1e-4)


def test_sums_of_exponents_from_the_attention_itself_spare_a_pass():
    query, key = torch.randn(1, 4, 50, 64, device=DEVICE), torch.randn(1, 2, 50, 64, device=DEVICE)
    logits = query.unflatten(1, (2, 2)) @ key[:, :, None].transpose(-1, -2) / 8
    future = torch.ones(50, 50, dtype=torch.bool, device=DEVICE).triu(1)
    log_sums = logits.masked_fill(future, -torch.inf).logsumexp(dim=-1).flatten(1, 2)
    options = {"scale": 0.125, "lengths": torch.tensor([50], dtype=torch.int32, device=DEVICE)}
    expected = reference_attention.significance(query, key, Significance(), **options)
    seen = significance_triton(query, key, observed=0, own_score=False, log_sums=log_sums, **options)
    assert_close("sums", seen, expected, 1e-4)
    with pytest.raises(ValueError, match="and all later queries count"):
        significance_triton(query, key, observed=64, own_score=False, log_sums=log_sums, **options)


def test_shapes_that_do_not_fit_are_refused():
    query, key = torch.zeros(1, 3, 5, 64), torch.zeros(1, 2, 5, 64)
    options = {"observed": 0, "own_score": False, "scale": 1.0, "lengths": torch.tensor([5])}
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 KV heads"):
        significance_triton(query, key, **options)
    with pytest.raises(ValueError, match="5 queries meet 4 keys"):
        significance_triton(query, key[:, :, :4], **options)
