"""Many requests of random lengths, cancelled and preempted at random, over a decoder that only moves pages."""

import random

import torch

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.engine import LLM, SamplingParams, Weights
from diffkv_repro.models.shapes import ModelShape

REQUESTS = 10_000
SHAPE = ModelShape("tiny", "", layers=1, hidden=32, intermediate=32, heads=2, kv_heads=2, head_dim=16, vocab=50)


class PagesOnly:
    """Keeps and drops random shares of tokens; logits are random."""

    def __init__(self, decoder, seed):
        self.weights, self.cache = decoder.weights, decoder.cache
        self.generator = torch.Generator().manual_seed(seed)

    def prompt(self, slots, rows, tokens, lengths):
        shares = torch.rand(len(slots), 1, 2, 3, generator=self.generator)
        counts = (shares[..., :2] / shares.sum(-1, keepdim=True) * lengths[:, None, None, None]).int()
        self.cache.memory.compact(slots, counts)
        return torch.rand(len(slots), 50, generator=self.generator)

    def step(self, tokens, active, rows, columns, prompts, bound):
        memory = self.cache.memory
        memory.reserve_step(active)
        tier = torch.randint(0, 3, (len(rows), 1, 2), generator=self.generator)
        grown = torch.nn.functional.one_hot(tier, 3)[..., :2].int()  # a third of the tokens stays in no tier
        memory.lengths.index_add_(0, rows.long(), grown)
        return torch.rand(len(rows), 50, generator=self.generator)


def test_every_request_ends_once_and_no_page_is_lost():
    policy = CompressionPolicy.paper(group_max="each-step", window=4)
    weights = Weights.random(SHAPE, max_positions=64, device="cpu", dtype=torch.float32)
    llm = LLM(weights, policy, max_requests=24, max_tokens=64, pool_bytes=300_000, max_batch_tokens=256)
    llm.runner.decoder = PagesOnly(llm.runner.decoder, seed=0)
    draw = random.Random(0)
    ended, added, preempted = {}, 0, 0
    while added < REQUESTS or not llm.scheduler.idle:
        for _ in range(draw.randint(0, 12)):
            if added < REQUESTS:
                params = SamplingParams(max_tokens=draw.randint(1, 24))
                llm.add([1] * draw.randint(1, 40), params)
                added += 1
        outputs = llm.step()
        if draw.random() < 0.05:
            known = [own.number for own in (*llm.scheduler.waiting, *llm.scheduler.running)]
            outputs += llm.cancel(*draw.sample(known, min(2, len(known))))
        for output in outputs:
            if output.finish_reason:
                assert output.number not in ended
                ended[output.number] = output.finish_reason
                preempted += output.preemptions
    assert len(ended) == REQUESTS
    assert set(ended.values()) == {"length", "cancelled"}
    assert preempted > 100
    memory = llm.cache.memory
    assert memory.synchronize_counts() == len(memory.free)
    assert memory.free.sort().values.equal(torch.arange(len(memory.free), dtype=torch.int32))
    assert memory.free_bound == len(memory.free)
