"""DuoAttention's optimised gates (Xiao et al., ICLR 2025, section 2.3): which KV heads need far tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture
from diffkv_repro.kvserve.heads import HeadScores
from diffkv_repro.kvserve.registry import require_share, require_whole
from diffkv_repro.models.hf import AttentionCall, UnsupportedAttention, decoder_of, intercept_attention
from diffkv_repro.models.zoo import LoadedModel


def optimise_gates(
    loaded: LoadedModel,
    *,
    steps: int = 100,
    length: int = 256,
    sink: int = 16,
    recent: int = 64,
    rate: float = 0.02,
    penalty: float = 0.05,
    seed: int = 0,
) -> HeadScores:
    """A gate in [0, 1] for each KV head, found by ``steps`` of Adam; 1 means that it needs every token.

    Attention is gate x full + (1 - gate) x streaming, which sees ``sink`` first and ``recent`` last tokens. Gates begin
    at 1. The loss is the squared distance of the last hidden states from those of full attention, over their mean
    square, where ``length`` random tokens are said a second time, plus ``penalty`` times the mean gate. DuoAttention
    recalls pass keys from texts instead, divides by nothing, and takes 2,000 steps of 1 K to 32 K tokens.
    Raises ValueError for sizes with which streaming heads would see it all, UnsupportedAttention for sliding windows.
    """
    for name, value in (("steps", steps), ("length", length), ("recent", recent)):
        require_whole(name, value, 1)
    require_whole("sink", sink, 0)
    require_share("rate", rate, 0.0, 1.0)
    require_share("penalty", penalty, 0.0, 100.0)
    if sink + recent >= length:
        raise ValueError(f"sink {sink} and recent {recent} are not less than the length of {length}: nothing is far")
    layout = loaded.layout
    if any(layer.kind != "full" for layer in layout.layers):
        raise UnsupportedAttention(f"{loaded.name} has layers with a sliding window: their heads have no gate")
    gates = torch.ones(len(layout.layers), layout.kv_heads, device=loaded.device, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam([gates], lr=rate)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    losses = []
    with _frozen(loaded.model):
        for _ in range(steps):
            said = torch.randint(0, vocabulary, (1, length), generator=generator)
            ids = torch.cat([said, said], dim=1).to(loaded.device)
            with torch.no_grad():
                wanted = _hidden(loaded, ids, None, sink, recent)[:, length:].float()
            found = _hidden(loaded, ids, gates, sink, recent)[:, length:].float()
            distance = (found - wanted).square().mean() / wanted.square().mean()
            optimiser.zero_grad()
            (distance + penalty * gates.mean()).backward()
            optimiser.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
            losses.append(float(distance.detach()))
    settings: dict[str, Any] = {
        "steps": steps, "length": length, "sink": sink, "recent": recent, "rate": rate, "penalty": penalty,
        "seed": seed, "distance": losses[-1],
    }  # fmt: skip
    return HeadScores(
        scores=tuple(map(tuple, gates.detach().double().cpu().tolist())),
        method="gates",
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        settings=settings,
        provenance=capture(root=project_root(), seed=seed, config=settings | {"model": loaded.name}).as_dict(),
    )


def _hidden(loaded: LoadedModel, ids: Tensor, gates: Tensor | None, sink: int, recent: int) -> Tensor:
    """Last hidden states [1, tokens, hidden], with full attention where there are no gates."""
    at = torch.arange(ids.shape[1], device=ids.device)
    full = at <= at[:, None]
    near = full & ((at < sink) | (at > at[:, None] - recent))

    def attend(call: AttentionCall) -> Tensor:
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (part.repeat_interleave(group, dim=1) for part in (call.key, call.value))
        scores = torch.matmul(call.query, key.transpose(-1, -2)) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap

        def seen(mask: Tensor) -> Tensor:
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
            return torch.matmul(weights.to(value.dtype), value)

        if gates is None:
            return seen(full)
        gate = gates[call.layer].repeat_interleave(group)[None, :, None, None].to(value.dtype)
        return gate * seen(full) + (1 - gate) * seen(near)

    with intercept_attention(loaded.model, attend):
        return decoder_of(loaded.model)(input_ids=ids, use_cache=False).last_hidden_state


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """No gradients of weights: only the gates learn."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
