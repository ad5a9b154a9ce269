"""Decisions and moves of a generation step: those of the rules, and whole generations like the packed cache's."""

import pytest
import torch
from cache_helpers import cut, place_of, prompt_of, random_call, rows_of
from diffkv_repro.kernels.append import append_triton
from diffkv_repro.kernels.decide import decide_triton
from paged_helpers import DEVICE, assert_close, moved, random_rows
from paged_states import POLICIES, check_decision, generate, random_state, stored

from diffkv_repro.cache.tiered import TieredLayer
from diffkv_repro.diffkv import paged_ops, reference_step
from diffkv_repro.diffkv.paged_view import PLAN_FIELDS, KeyBias, PagedRule

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_the_rules(name):
    for seed in range(6):  # of eight heads each, for each policy: 288 states
        check_decision(paged_ops, name, (1, 5, 6, 25, 40, 60)[seed], seed, DEVICE)


@pytest.mark.parametrize("name", ["paper", "released", "three tiers"])
@pytest.mark.parametrize("block", [16, 512])
def test_plans_are_the_twin_s_in_all_layers_at_once(name, block):
    policy = POLICIES[name]
    view, rows, *_, prompt = random_state(policy, 45, 7, DEVICE)
    view.lengths[:, 0] = view.lengths[:, 1]
    view.tables[:, :, 0] = view.tables[:, :, 1]
    rule = PagedRule.of([policy.rule(place_of())] * 2, 2)
    rule = PagedRule(rule.alphas.to(DEVICE), *list(vars(rule).values())[1:])
    rule.alphas[0] *= 2
    rows[2] = -1
    columns, prompts = (torch.full((4,), number, dtype=torch.int32, device=DEVICE) for number in (45, prompt))
    plan = torch.full((2, 4, 2, PLAN_FIELDS), 77, dtype=torch.int32, device=DEVICE)
    seen = decide_triton(view, rows, columns, prompts, rule, plan=plan, block=block)
    assert seen.data_ptr() == plan.data_ptr()
    assert torch.equal(seen, reference_step.decide(view, rows, columns, prompts, rule))
    assert torch.equal(seen[1], decide_triton(view, rows, columns, prompts, rule, layer=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["paper", "three tiers", "FP16"])
def test_moves_are_the_twin_s_byte_for_byte(name, dtype):
    """Every kind of move at once, one a head: also onto a slot that is being left, and across a page's end."""
    policy = POLICIES[name]
    view, rows, *_ = random_state(policy, 40, 5, DEVICE)
    last = len(policy.tiers) - 1
    lengths = view.lengths[rows.long(), 1].cpu()
    plan = torch.full((4, 2, PLAN_FIELDS), -1, dtype=torch.int32)
    plan[0, 0, 0] = lengths[0, 0, 0]  # append
    plan[0, 1, 0] = 3  # over a pruned one
    plan[1, 0] = torch.tensor([2, 0, 2, last, lengths[1, 0, last], -1, -1, -1])  # victim demoted, its slot reused
    plan[1, 1] = torch.tensor([2, 1, 1, -1, -1, 2, 1, 1])  # victim pruned, candidate in its slot
    plan[2, 0] = torch.tensor([1, -1, -1, -1, -1, 1, 1, lengths[2, 0, 1]])  # candidate appended to the low tier
    if last == 2:
        plan[2, 1] = torch.tensor([4, 1, 0, 2, lengths[2, 1, 2], 4, 1, 0])  # three tokens move up one place
    rows[3] = -1
    plan = plan.to(DEVICE)
    key, value = (random_rows(4, 2, 16, seed=seed).clamp(-6e4, 6e4).to(dtype) for seed in (1, 2))
    columns = torch.full((4,), 40, dtype=torch.int32, device=DEVICE)
    twin, kernel = moved(view, "cpu"), moved(view, DEVICE)
    bias = KeyBias(torch.randn(2, 2, 16, device=DEVICE), torch.randn(50, 16, device=DEVICE))
    given = (key, value, plan, rows, columns)
    for own in (None, bias) if DEVICE.type == "cpu" else (None,):
        reference_step.append(twin, *(part.cpu() for part in given), layer=1, bias=own)
        append_triton(kernel, *given, layer=1, bias=own)
        assert torch.equal(twin.lengths, kernel.lengths.cpu())
        assert torch.equal(twin.pool, kernel.pool.cpu())
    assert bool((kernel.pool != view.pool).any())


@pytest.mark.parametrize("name", ["paper", "released", "three tiers"])
def test_a_generation_is_that_of_the_packed_cache(name):
    policy, prompt, tokens = POLICIES[name], 20, 30
    place = place_of(head_dim=16)
    call = random_call(tokens=tokens, seed=1, head_dim=16)
    layer = TieredLayer(place, policy.rule(place), storage="packed")
    layer.prefill(prompt_of(cut(call, 0, prompt)), rows_of(2, prompt))
    moved = type(call)(call.layer, *(t.to(DEVICE) for t in (call.query, call.key, call.value)), call.scale, None, None)
    for at, (view, rows, output) in enumerate(generate(paged_ops, policy, moved, prompt, place=place), start=prompt):
        if output is not None:
            assert_close(f"output {at}", output, layer.decode(cut(call, at - 1, at), rows_of(2, at))[:, :, 0])
        tier, score = stored(view, rows, at)
        assert torch.equal(tier, layer.store.tier), f"tiers differ with {at} tokens"
        torch.testing.assert_close(score, layer.store.scores[:, :, 0], rtol=2e-3, atol=1e-4)
