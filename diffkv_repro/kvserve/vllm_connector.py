"""KVServe in vLLM: a connector that keeps the KV caches of prompts as compressed frames for other instances.

    --kv-transfer-config '{"kv_connector": "KVServeConnector",
      "kv_connector_module_path": "diffkv_repro.kvserve.vllm_connector", "kv_role": "kv_producer",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": "/shared/frames"}}'

``store`` may also be the address of ``diffkv-repro serve frames``: ``{"store": "tcp://HOST:5750", "keys": "FOLDER"}``.

The instance that prefills stores a frame in the step that completes the prompt; one that is asked for a prompt that
begins with the same tokens loads it before its own prefill, which is then left with the rest. A frame that is missing,
damaged or another model's costs a prefill and nothing else. Settings: :class:`ConnectorSettings`.

Written for vLLM 0.32 and 0.33 (``KVConnectorBase_V1``, "experimental and subject to change"); run with 0.32 on CPUs,
compared with the sources of 0.33. Not supported, and refused by name: tensor, pipeline and context parallelism, latent
attention, layers that differ in shape, a quantised KV cache. Requests with LoRA adapters, images or prompt embeddings
are served without transfers.
"""

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from diffkv_repro.kvserve.layout import KVLayout, rope_words
from diffkv_repro.kvserve.vllm_layout import kernel_order
from diffkv_repro.kvserve.vllm_plans import Load, Plans, Report, Save
from diffkv_repro.kvserve.vllm_settings import ConnectorSettings
from diffkv_repro.kvserve.vllm_transfer import Transfer
from diffkv_repro.models.zoo import weights_fingerprint

SUPPORTED = ((0, 32), (0, 33))


def require_version(version: str) -> None:
    """Raise ImportError unless ``version`` is one of vLLM that this connector was written for."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ImportError(f"vLLM here is {version}; KVServeConnector follows the interface of {known}")


try:
    import vllm
except ImportError as error:
    raise ImportError(
        "diffkv_repro.kvserve.vllm_connector is loaded by vLLM, which is not installed here; "
        "docs/serving-vllm.md says how to make an environment with it"
    ) from error
require_version(vllm.__version__)

# Only now: an unsupported version may not have them.
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(f"vllm.{__name__}")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers: this step's loads and saves, and the blocks that were given out for it."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    fresh: tuple[int, ...] = ()


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """From a worker to the scheduler: what came of them."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """Both."""
        saved, lost = self.report.saved + other.report.saved, self.report.lost + other.report.lost
        return StepReport(Report(saved, lost))


class KVServeConnector(KVConnectorBase_V1):
    """vLLM's interface over :class:`Plans` in the scheduler and :class:`Transfer` in the worker.

    Raises ValueError at start for settings, models and profiles that it cannot serve.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config
        settings = ConnectorSettings.from_extra(given.kv_connector_extra_config)
        layout = layout_of(vllm_config, kv_cache_config, settings.model_id)
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._plans: Plans | None = None
        self._transfer: Transfer | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._plans = Plans(
                settings, layout, settings.open(), block_size, saves=given.is_kv_producer, loads=given.is_kv_consumer
            )
            if given.is_kv_consumer and given.kv_load_failure_policy != "recompute":
                log.warning("kv_load_failure_policy is %r: a damaged frame fails its request; 'recompute' computes it",
                            given.kv_load_failure_policy)  # fmt: skip
        else:
            self._transfer = Transfer(settings, layout, settings.open(), block_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """A frame that was not stored is a prefill elsewhere, no error."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a frame can give beyond the computed ones; loads take place within the step."""
        return self._plans.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note the blocks that a request was given."""
        self._plans.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The loads and saves of a step."""
        return StepMetadata(*self._plans.step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in a worker's report."""
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, StepReport):
            self._plans.report(found.report)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: what was to be stored was copied out of them in its step."""
        self._plans.finished(request.request_id)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's caches."""
        tensor = next(iter(kv_caches.values()), None)
        on_cpu = tensor is not None and tensor.device.type == "cpu"
        order = _asked_order(self._vllm_config, next(iter(kv_caches)), tensor) if on_cpu else None
        self._transfer.register(kv_caches, order)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Load the frames of this step."""
        self._transfer.load(self._step().loads, self._step().fresh)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are done when the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do yet: a frame is made of all layers, when the step ends."""

    def wait_for_save(self) -> None:
        """Store the frames of this step."""
        self._transfer.save(self._step().saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose frames could not be used."""
        return self._transfer.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This step's report."""
        report = self._transfer.take_report()
        return None if report is None else StepReport(report)

    def _step(self) -> StepMetadata:
        found = self._get_connector_metadata()
        return found if isinstance(found, StepMetadata) else StepMetadata()


def layout_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", model_id: str | None) -> KVLayout:
    """The layout of an engine's cache: the same as ``KVLayout.of`` a model loaded from the same files, so that either
    reads the other's frames. Raises ValueError for engines that are not supported."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.world_size != 1:
        raise ValueError(f"the engine has {parallel.world_size} workers; supported is 1, without tensor parallelism")
    if getattr(parallel, "decode_context_parallel_size", 1) != 1:
        raise ValueError("decode context parallelism spreads a request's tokens; it is not supported")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"the model has {len(groups)} groups of KV caches; supported is 1 (full attention in all layers)"
        )
    spec = groups[0].kv_cache_spec
    needed = ("num_kv_heads", "head_size", "dtype", "block_size")
    lacking = [name for name in needed if not hasattr(spec, name)]
    if lacking or "MLA" in type(spec).__name__ or getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise ValueError(f"KV caches are of {type(spec).__name__}; supported are keys and values of one size, per head")
    config = model.hf_config
    if model_id is None:
        model_id = weights_fingerprint(str(model.model), config)
        if model_id.endswith("@None"):
            raise ValueError(f"what weights {model.model!r} has is not known: name them, as model_id in the settings")
        if model.quantization is not None:
            model_id += f"+{model.quantization}"
    return KVLayout(
        len(set(groups[0].layer_names)), spec.num_kv_heads, spec.head_size, spec.dtype, rope_words(config), model_id
    )


def _asked_order(vllm_config: "VllmConfig", name: str, cache: torch.Tensor) -> torch.Tensor:
    """The order of numbers in a CPU's blocks, asked from the attention layer that will read them."""
    layer = vllm_config.compilation_config.static_forward_context[name]

    def store(key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, key, value, blocks, slots)

    _, kv_heads, slots, width = cache.shape
    return kernel_order(store, kv_heads, slots, width // 2, cache.dtype)
