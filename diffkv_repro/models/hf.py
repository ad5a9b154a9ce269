"""The only module that touches transformers' attention (and, later, cache) interfaces.

transformers calls a registered attention function with post-RoPE queries, keys and values. One function of
ours is registered under one name; :func:`intercept_attention` points a model at it for the length of a
``with`` block and puts everything back, also after an exception.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

_NAME = "diffkv_repro"
_LAYER_KINDS = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}


class UnsupportedAttention(ValueError):
    """The model's attention is of a kind this package cannot observe or compress; the text says why."""


@dataclass(frozen=True)
class LayerAttention:
    """One layer: ``full`` causal attention, or ``sliding`` over the last ``window`` positions, own included."""

    kind: Literal["full", "sliding"]
    window: int | None = None


@dataclass(frozen=True)
class AttentionLayout:
    """Shape of a model's attention: query heads, KV heads and head_dim, and the kind of every layer."""

    layers: tuple[LayerAttention, ...]
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        sliding = [layer.window for layer in self.layers if layer.kind == "sliding"]
        kinds = f"{len(self.layers) - len(sliding)} full"
        if sliding:
            kinds += f" + {len(sliding)} sliding ({sliding[0]})"
        return f"{kinds} layers, {self.heads}/{self.kv_heads} heads, head_dim {self.head_dim}"


@dataclass(frozen=True)
class AttentionCall:
    """What a layer's attention is given.

    ``query`` [batch, heads, queries, head_dim]; ``key`` and ``value`` [batch, kv_heads, keys, head_dim], keys
    after RoPE. ``window`` is None for full attention, ``softcap`` None where logits are not capped.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None


Attend = Callable[[AttentionCall], Tensor]
_attend: ContextVar[Attend | None] = ContextVar("diffkv_repro_attend", default=None)


def attention_layout(model: PreTrainedModel) -> AttentionLayout:
    """The layout of ``model``; raises UnsupportedAttention with the reason where it cannot be handled."""
    config = model.config.get_text_config()
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedAttention(f"{kind} is an encoder-decoder model; only causal decoders are supported")
    if not getattr(config, "is_causal", True):
        raise UnsupportedAttention(f"{kind} is configured with bidirectional attention")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedAttention(
            f"{kind} uses multi-head latent attention (kv_lora_rank {config.kv_lora_rank}): it caches one "
            "low-rank vector a token instead of keys and values"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedAttention(f"{kind} is configured with bidirectional attention")
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UnsupportedAttention(f"{kind} has no attention heads")
    if not model._can_set_attn_implementation():
        raise UnsupportedAttention(f"{kind} does not route its attention through transformers' interface")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UnsupportedAttention(f"{kind}: {heads} query heads are no multiple of {kv_heads} KV heads")
    return AttentionLayout(
        layers=_layers(config, kind),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _layers(config: PreTrainedConfig, kind: str) -> tuple[LayerAttention, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        # Mistral and Phi-3 have no layer_types: a window there holds for every layer. Qwen2-style configs
        # carry a window that use_sliding_window switches off.
        sliding = window is not None and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    unknown = sorted(set(types) - set(_LAYER_KINDS))
    if unknown:
        raise UnsupportedAttention(
            f"{kind} has layers of type {', '.join(unknown)}; supported are {', '.join(_LAYER_KINDS)}"
        )
    kinds = [_LAYER_KINDS[name] for name in types]
    return tuple(LayerAttention(k, window if k == "sliding" else None) for k in kinds)


@contextmanager
def intercept_attention(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Let ``attend`` compute the attention of every layer of ``model`` inside the block.

    ``attend`` gets an :class:`AttentionCall` and returns the output, [batch, heads, queries, head_dim].
    transformers builds no mask meanwhile (it would be queries x keys): causality, the window and padding are
    for ``attend`` to apply. Raises UnsupportedAttention before anything runs where the model does not fit.
    """
    layout = attention_layout(model)
    configs = _configs(model)
    before = [(config, dict(config.__dict__)) for config in configs]
    token = _attend.set(_checked(attend, layout))
    try:
        model.set_attn_implementation(_NAME)
        if model.config._attn_implementation != _NAME:
            raise UnsupportedAttention(f"{type(model).__name__} refused another attention function")
        yield
    finally:
        _attend.reset(token)
        for config, attributes in before:
            config.__dict__.clear()
            config.__dict__.update(attributes)


def intercepting() -> bool:
    """Whether an :func:`intercept_attention` block is active here."""
    return _attend.get() is not None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its language-model head, whose logits over a long prompt would dwarf everything."""
    return model.base_model


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    owners = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    found = [config for owner in owners for config in (owner.config, owner.config.get_text_config())]
    return list({id(config): config for config in found}.values())


def _checked(attend: Attend, layout: AttentionLayout) -> Attend:
    """``attend`` behind a test that the model does what its configuration says."""

    def checked(call: AttentionCall) -> Tensor:
        shapes = {
            "query": (call.query, layout.heads),
            "key": (call.key, layout.kv_heads),
            "value": (call.value, layout.kv_heads),
        }
        for name, (tensor, heads) in shapes.items():
            if tensor.shape[1] != heads or tensor.shape[-1] != layout.head_dim:
                raise UnsupportedAttention(
                    f"layer {call.layer}: {name} is {tuple(tensor.shape)}, not {heads} heads of {layout.head_dim}"
                )
        planned = layout.layers[call.layer]
        if call.window != planned.window:
            raise UnsupportedAttention(
                f"layer {call.layer} attends over a window of {call.window}, its configuration says {planned.window}"
            )
        return attend(call)

    return checked


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls; output [batch, queries, heads, head_dim]."""
    attend = _attend.get()
    if attend is None:
        raise RuntimeError(f"attention function {_NAME!r} is only for use inside intercept_attention()")
    if s_aux is not None:
        raise UnsupportedAttention(f"layer {module.layer_idx} uses attention sinks (s_aux)")
    if attention_mask is not None:
        raise UnsupportedAttention(f"layer {module.layer_idx} was given a mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention(f"layer {module.layer_idx} is not causal")
    if dropout:
        raise UnsupportedAttention("attention dropout is on; call model.eval() first")
    call = AttentionCall(
        layer=module.layer_idx,
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return attend(call).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _interface)
