"""Free-running generation: how many tokens until a compressed cache leads to another text than FP16."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from rich.progress import track

from diffkv_repro.cache import FullPrecision, Method, compress
from diffkv_repro.core.files import write_text
from diffkv_repro.evaluation.sweep import code_digest
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.windows import Window


def divergence(
    loaded: LoadedModel,
    windows: Sequence[Window],
    methods: Sequence[Method],
    folder: Path,
    *,
    prompt_tokens: int,
    new_tokens: int,
    batch: int = 12,
    storage: str = "simulated",
) -> pd.DataFrame:
    """Greedy continuations of the first ``prompt_tokens`` of each window under every method.

    A row each: ``window``, ``method``, ``agreed`` tokens before the first difference from FP16 (``new_tokens`` where
    there is none), ``nominal`` and ``true`` bytes of the batch at its end. Kept in ``folder``.
    """
    if new_tokens < 1 or prompt_tokens < 1:
        raise ValueError(f"prompt_tokens is {prompt_tokens}, new_tokens {new_tokens}; both must be at least 1")
    rows = []
    groups = [windows[start : start + batch] for start in range(0, len(windows), batch)]
    for group in track(groups, "texts generated"):
        ids = torch.cat([window.input_ids for window in group])[:, :prompt_tokens]
        full = None
        for method in [FullPrecision(), *(method for method in methods if not isinstance(method, FullPrecision))]:
            what = [
                loaded.fingerprint, str(loaded.model.dtype), loaded.device.type, repr(method), new_tokens, storage,
                list(ids.shape), code_digest(),
            ]  # fmt: skip
            key = hashlib.sha256(json.dumps(what).encode() + ids.numpy().tobytes()).hexdigest()[:24]
            found = _kept(Path(folder) / f"{key}.json", loaded, ids, method, new_tokens, storage)
            tokens = torch.tensor(found["tokens"])
            full = tokens if full is None else full
            for window, own, reference in zip(group, tokens, full, strict=True):
                different = (own != reference).nonzero().flatten()
                agreed = int(different[0]) if len(different) else new_tokens
                row = {"window": window.label, "method": method.label, "agreed": agreed}
                rows.append(row | {"nominal": found["nominal"], "true": found["true"]})
    return pd.DataFrame(rows)


def _kept(path: Path, loaded: LoadedModel, ids: torch.Tensor, method: Method, new_tokens: int, storage: str) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("tokens", "nominal", "true")}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    prompt = ids.to(loaded.device)
    with torch.inference_mode(), compress(loaded.model, method, storage=storage) as session:
        output = loaded.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip
        size = session.cache.kv_bytes()
    tokens = output[:, prompt.shape[1] :].tolist()
    found = {"tokens": tokens, "nominal": size.nominal_ratio, "true": size.true_ratio}
    write_text(path, json.dumps(found) + "\n")
    return found
