"""Prompts in the pages of one worker, on their way to another."""

from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from kvserve_helpers import DTYPES, KINDS, kv_of, layout_of

from diffkv_repro.evaluation.page_transfer import PageTransfer
from diffkv_repro.kvserve import (
    Assets,
    Profile,
    PromptScores,
    TokenTiers,
)

TIERS = {
    "two": TokenTiers(alphas=(1.2, 0.6), window=3),
    "one": TokenTiers(("K4V2",), (0.8,), window=1),
    "half": TokenTiers(("K16V16", "K8V4:2/2"), (1.0, 0.9), window=2),
    "three, last": TokenTiers(("K8V8", "K4V4", "K2V1"), (1.4, 1.0, 0.7), 4, observed=5, own_score=True),
    "by position": TokenTiers(("K8V4", "K4V16"), (0.5, 0.2), 5, by_position=True),
}


def received(layout, tokens, quantizer, seed=0):
    """Scores about 1 / N each, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(layout.layers, layout.kv_heads, tokens, generator=generator)
    counts = quantizer.significance.counts(tokens, tokens, torch.device("cpu"))
    return Assets(
        received=PromptScores(quantizer.significance, list(drawn.mul(2).sub(0.1).clamp_min(0) * counts / tokens))
    )


def made(layout, tokens, quantizer, kind="normal", seed=0, codec=None, page_bytes=None):
    kv, assets = kv_of(layout, tokens, kind, seed), received(layout, tokens, quantizer, seed)
    profile = Profile((), quantizer) if codec is None else Profile((), quantizer, codec)
    transfer = PageTransfer.of(kv, layout, profile, assets, page_bytes=page_bytes, seed=seed)
    return SimpleNamespace(kv=kv, assets=assets, profile=profile, transfer=transfer, layout=layout)


@st.composite
def prompts(draw):
    layout = layout_of(
        draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([16, 48, 80])),
        draw(st.sampled_from(DTYPES)),
    )  # fmt: skip
    tokens = draw(st.sampled_from([1, 2, 63, 65]) | st.integers(1, 90))
    return layout, tokens, draw(st.sampled_from(list(TIERS.values()))), draw(st.sampled_from(KINDS)), draw(
        st.integers(0, 99)
    )  # fmt: skip
