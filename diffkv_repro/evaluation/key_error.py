"""How much of the keys a quantiser loses, layer by layer, with and without the bias of their projection."""

import pandas as pd
import torch

from diffkv_repro.cache.layer import Place
from diffkv_repro.cache.method import bias_transform
from diffkv_repro.core.vectors import VectorCodec
from diffkv_repro.evaluation.teacher_forced import Prefilled
from diffkv_repro.models.hf import attention_layout
from diffkv_repro.models.rope import Rope, key_biases


def key_errors(model, prefilled: Prefilled, *, bits: int) -> pd.DataFrame:
    """Columns ``layer``, ``plain`` and, where the keys have a bias, ``bias_free``.

    Root mean square error of the keys of the prompt after a round trip through ``bits`` bits per token and KV head, in
    units of the root mean square of the keys without their bias: of what a key says about its token.
    """
    layout, biases = attention_layout(model), key_biases(model)
    rope = Rope(model) if any(bias is not None for bias in biases) else None
    rows = []
    for index, (prompt, bias) in enumerate(zip(prefilled.prompts, biases, strict=True)):
        key = prompt.call.key.float()
        codec = VectorCodec(layout.head_dim, bits)
        transform = bias_transform(Place(index, layout, torch.float32, key.device, rope, bias))
        centred = key if transform is None else transform.forward(key, prefilled.rows.positions)
        scale = centred.square().mean().sqrt()
        row = {"layer": index, "plain": _rms(codec, key) / scale}
        if transform is not None:
            row["bias_free"] = _rms(codec, centred) / scale
        rows.append({name: float(value) for name, value in row.items()})
    return pd.DataFrame(rows).astype({"layer": int})


def _rms(codec: VectorCodec, key: torch.Tensor) -> torch.Tensor:
    return (codec.round_trip(key, torch.float32) - key).square().mean().sqrt()
