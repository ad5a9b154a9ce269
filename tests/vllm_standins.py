"""A stand-in for the parts of vLLM that the connector meets, and an engine that drives it as vLLM's scheduler does.

The engine "computes" the keys and values of a prompt from its tokens alone, so that a test can tell what every slot
must hold. Attributes have the names of vLLM 0.32's; test_vllm_contract.py compares them with its sources.
"""

import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import torch

from diffkv_repro.kvserve import Profile
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.library import LibraryEntry

MODULE = "diffkv_repro.kvserve.vllm_connector"
PROMPT = [7 * i % 101 + 1 for i in range(150)]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Base:
    """KVConnectorBase_V1 as far as it is used."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role = vllm_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata = None

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


def install(monkeypatch, version="0.32.0"):
    """The connector's module, imported afresh beside a vLLM of ``version``."""
    base = ModuleType(BASE)
    base.KVConnectorBase_V1 = Base
    base.KVConnectorMetadata = type("KVConnectorMetadata", (), {})
    base.KVConnectorWorkerMetadata = type("KVConnectorWorkerMetadata", (), {})
    base.KVConnectorRole = SimpleNamespace(SCHEDULER=0, WORKER=1)
    parts = BASE.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    monkeypatch.setitem(sys.modules, BASE, base)
    sys.modules["vllm"].__version__ = version
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


def store_gpu(key, value, cache, slot_mapping):
    slots = cache.shape[2]
    cache[slot_mapping // slots, :, slot_mapping % slots] = torch.cat([key, value], dim=-1)


def store_cpu(key, value, cache, slot_mapping):
    blocks, heads, slots, width = cache.shape
    flat = cache.view(blocks, heads, 2, slots * width // 2)
    for k, v, slot in zip(key, value, slot_mapping.tolist(), strict=True):
        block, offset = divmod(slot, slots)
        flat[block, :, 0].view(heads, width // 2, slots)[:, :, offset] = k
        flat[block, :, 1].view(heads, slots, width // 2)[:, offset] = v


class Engine:
    """One instance: a scheduler's and a worker's connector, paged caches, and steps."""

    layers, heads, dim, blocks = 2, 3, 8, 24

    def __init__(self, module, extra, role="kv_both", *, block=16, store=store_cpu, dtype=torch.float32, **changes):
        self.block, self.store = block, store
        shape = (self.blocks, self.heads, block, 2 * self.dim)
        self.caches = {f"model.layers.{layer}.attn": torch.zeros(shape, dtype=dtype) for layer in range(self.layers)}
        layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda layer, *given: store(*given)))
        hf_config = SimpleNamespace(rope_parameters={"rope_theta": 1e4}, _commit_hash="abc")
        hf_config.get_text_config = lambda: hf_config
        self.config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=extra, kv_load_failure_policy="recompute",
                is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer",
            ),
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
            model_config=SimpleNamespace(model="some/model", hf_config=hf_config, quantization=None),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(self.caches, layer)),
        )  # fmt: skip
        spec = SimpleNamespace(num_kv_heads=self.heads, head_size=self.dim, dtype=dtype, block_size=block)
        group = SimpleNamespace(layer_names=list(self.caches), kv_cache_spec=spec)
        self.cache_config = SimpleNamespace(kv_cache_groups=[group])
        for path, value in changes.items():
            holder, name = path.split("__")
            setattr({"spec": spec, "group": group}.get(holder) or getattr(self.config, holder), name, value)
        self.scheduler = module.KVServeConnector(self.config, 0, self.cache_config)
        self.worker = module.KVServeConnector(self.config, 1, self.cache_config)
        self.worker.register_kv_caches(self.caches)
        self.free, self.computed, self.recomputed = list(range(self.blocks)), 0, 0

    def kv(self, tokens, layer):
        """What the model makes of tokens: [heads, tokens, dim] x 2, each of all tokens up to its own."""
        seen = torch.tensor(tokens, dtype=torch.float64).cumsum(0)[None, :, None] + layer
        grid = torch.arange(1, self.heads * self.dim + 1, dtype=torch.float64).view(self.heads, 1, self.dim)
        dtype = next(iter(self.caches.values())).dtype
        return torch.sin(seen * grid).to(dtype), torch.cos(seen * grid).to(dtype)

    def compute(self, tokens, blocks, start, stop):
        """Put keys and values of tokens ``start`` to ``stop`` into blocks, as a forward pass does."""
        at = torch.tensor([blocks[i // self.block] * self.block + i % self.block for i in range(start, stop)])
        for layer, cache in enumerate(self.caches.values()):
            key, value = (part[:, start:stop].transpose(0, 1) for part in self.kv(tokens, layer))
            self.store(key, value, cache, at)
        self.computed += stop - start

    def read(self, blocks, tokens):
        return [layer.read(blocks, tokens) for layer in self.worker._transfer._layers]

    def serve(self, tokens, *, name="r0", local=0, chunk=10_000, **about):
        """Prefill a prompt of which ``local`` tokens are in blocks already; blocks and what was loaded."""
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=tokens, num_tokens=len(tokens), lora_request=None, mm_features=[],
            cache_salt=None, prompt_embeds=None,
        )  # fmt: skip
        vars(request).update(about)
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.block))]
        if local:
            self.compute(tokens, blocks, 0, local)
        external, later = self.scheduler.get_num_new_matched_tokens(request, local)
        assert later is False
        assert (external, later) == self.scheduler.get_num_new_matched_tokens(request, local), "free of side effects"
        done, first = local + external, True
        given = SimpleNamespace(get_block_ids=lambda: (list(blocks),))
        self.scheduler.update_state_after_alloc(request, given, external)
        while done < len(tokens):
            count = min(chunk, len(tokens) - done)
            invalid = self.step(request, blocks, done, count, first)
            if invalid:
                self.recomputed += done + count
                done, first = min(blocks.index(block) for block in invalid) * self.block, False
                continue
            done, first = done + count, False
        self.scheduler.request_finished(request, blocks)
        self.step(None, [], 0, 0, False)
        self.free += blocks
        return blocks, external

    def step(self, request, blocks, done, count, first):
        """One step of the scheduler and the worker; blocks that the worker reports."""
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={})
        if request is not None:
            output.num_scheduled_tokens = {request.request_id: count}
        if request is not None and first:
            output.scheduled_new_reqs = [
                SimpleNamespace(req_id=request.request_id, block_ids=(list(blocks),), num_computed_tokens=done)
            ]
        elif request is not None:
            cached.req_ids, cached.new_block_ids = [request.request_id], [None]
            cached.num_computed_tokens = [done]
        # Scheduler and worker are processes of their own, as a rule.
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output))))
        self.worker.start_load_kv(None)
        if request is not None:
            self.compute(request.prompt_token_ids, blocks, done, done + count)
        self.worker.wait_for_save()
        invalid = self.worker.get_block_ids_with_load_errors()
        found = pickle.loads(pickle.dumps(self.worker.build_connector_worker_meta()))
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=found))
        return invalid


def frames(tmp_path):
    return sorted((tmp_path / "store").glob("*.kvsf"))


def holds(engine, blocks, tokens):
    for layer, found in enumerate(engine.read(blocks, len(tokens))):
        key, value = engine.kv(tokens, layer)
        if not (torch.equal(found.key, key) and torch.equal(found.value, value)):
            return False
    return True


def entry(name, profile, ratio=2.0, speed=1e9, quality=1.0):
    return LibraryEntry(Profile.named(profile), MeasuredProfile(name, ratio, speed, speed, {"*": quality}))
