import pytest
import torch

from diffkv_repro.models.shapes import ModelShape
from diffkv_repro.models.step_cost import ModelStep

SHAPE = ModelShape("t", "t", layers=3, hidden=24, intermediate=40, heads=6, kv_heads=2, head_dim=8, vocab=50)


def by_hand(model, hidden):
    """The last token of a causal layer, head by head."""
    shape, (batch, tokens, _) = model.shape, hidden.shape

    def norm(x):
        return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    rows = norm(hidden) @ model.inward.T
    heads = rows.view(batch, tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    found = []
    for head in range(shape.heads):
        kv = shape.heads + head // shape.group
        scores = torch.einsum("bd,btd->bt", heads[:, -1, head], heads[:, :, kv]) / shape.head_dim**0.5
        found.append(torch.einsum("bt,btd->bd", scores.softmax(dim=-1), heads[:, :, kv + shape.kv_heads]))
    out = hidden[:, -1] + torch.cat(found, dim=-1) @ model.outward.T
    gate, up = (norm(out) @ model.gate_up.T).split(shape.intermediate, dim=-1)
    return out + (torch.nn.functional.silu(gate) * up) @ model.down.T


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 7)])
def test_a_layer_equals_the_one_by_hand_in_both_phases(batch, tokens):
    model = ModelStep(SHAPE, device="cpu")
    hidden = torch.randn(batch, tokens, SHAPE.hidden)
    expected = by_hand(model, hidden)
    torch.testing.assert_close(model._layer(hidden)[:, -1], expected)
    rows = torch.nn.functional.rms_norm(hidden, (SHAPE.hidden,)) @ model.inward.T
    heads = rows.view(batch, tokens, -1, SHAPE.head_dim).transpose(1, 2)
    _, keys, values = (part.clone() for part in heads.split([SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads], dim=1))
    keys[:, :, -1], values[:, :, -1] = torch.nan, torch.nan  # the token's own, which the step writes
    torch.testing.assert_close(model._layer(hidden[:, -1:], keys, values)[:, 0], expected)


@pytest.mark.parametrize("phase", ["prompt", "generation"])
@pytest.mark.parametrize("batch", [1, 11])
def test_both_phases_are_timed(phase, batch):
    cost = ModelStep(SHAPE, device="cpu").cost(phase, batch, 5, 2)
    assert (cost.phase, cost.batch, cost.length, cost.repeats) == (phase, batch, 5, 2)
    assert 0 < cost.median < 10


def test_a_prompt_batch_runs_every_request_once():
    model, seen = ModelStep(SHAPE, device="cpu"), []
    model._layer = lambda hidden: seen.append(len(hidden)) or hidden
    model._prompt(19, 2)()
    assert seen == [8, 8, 3]


def test_what_cannot_be_timed_is_refused():
    model = ModelStep(SHAPE, device="cpu")
    with pytest.raises(ValueError, match="phase is 'decode'; allowed are prompt and generation"):
        model.cost("decode", 1, 1, 1)
    with pytest.raises(ValueError, match="length is 0; it must be at least 1"):
        model.cost("prompt", 1, 0, 1)
    experts = ModelShape(**vars(SHAPE) | {"experts": 4})
    with pytest.raises(ValueError, match="t is a mixture of experts"):
        ModelStep(experts, device="cpu")
