"""Free-running generation: how many tokens until a compressed cache leads to another text than FP16."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.progress import track

from diffkv_repro.cache import FullPrecision, Method, compress
from diffkv_repro.core.files import write_text
from diffkv_repro.evaluation.digest import code_digest
from diffkv_repro.evaluation.workers import shared
from diffkv_repro.models.zoo import LoadedModel
from diffkv_repro.workloads.windows import Window


@dataclass(frozen=True)
class _Job:
    """A batch of prompts [texts, tokens] that one method has not continued yet, and where that is kept."""

    input_ids: torch.Tensor
    method: Method
    path: Path
    new_tokens: int
    storage: str


def divergence(
    loaded: LoadedModel,
    windows: Sequence[Window],
    methods: Sequence[Method],
    folder: Path,
    *,
    prompt_tokens: int,
    new_tokens: int,
    batch: int = 16,
    storage: str = "simulated",
    workers: int | None = None,
) -> pd.DataFrame:
    """Greedy continuations of the first ``prompt_tokens`` of each window under every method.

    A row each: ``window``, ``method``, ``agreed`` tokens before the first difference from FP16 (``new_tokens`` where
    there is none), ``nominal`` and ``true`` bytes of the batch at its end. Kept in ``folder``. ``workers`` processes
    share batches and methods, as in :func:`~diffkv_repro.evaluation.workers.shared`.
    """
    if new_tokens < 1 or prompt_tokens < 1:
        raise ValueError(f"prompt_tokens is {prompt_tokens}, new_tokens {new_tokens}; both must be at least 1")
    wanted = [FullPrecision(), *(method for method in methods if not isinstance(method, FullPrecision))]
    groups = [windows[start : start + batch] for start in range(0, len(windows), batch)]
    all_jobs = []
    for group in groups:
        ids = torch.cat([window.input_ids for window in group])[:, :prompt_tokens]
        for method in wanted:
            path = Path(folder) / f"{_key(loaded, ids, method, new_tokens, storage)}.json"
            all_jobs.append(_Job(ids, method, path, new_tokens, storage))
    jobs = [job for job in all_jobs if _read(job.path) is None]
    tokens = sum(job.input_ids.numel() + len(job.input_ids) * new_tokens for job in jobs)
    work = shared(loaded, _run, jobs, tokens=tokens, workers=workers)
    for _ in track(work, "texts generated", total=len(jobs), disable=not jobs):
        pass
    rows = []
    for index, group in enumerate(groups):
        full = None
        for job in all_jobs[index * len(wanted) : (index + 1) * len(wanted)]:
            found = _read(job.path)
            written = torch.tensor(found["tokens"])
            full = written if full is None else full
            for window, own, reference in zip(group, written, full, strict=True):
                different = (own != reference).nonzero().flatten()
                agreed = int(different[0]) if len(different) else new_tokens
                row = {"window": window.label, "method": job.method.label, "agreed": agreed}
                rows.append(row | {"nominal": found["nominal"], "true": found["true"]})
    return pd.DataFrame(rows)


def _run(loaded: LoadedModel, job: _Job) -> None:
    """Continue one batch, and write what came out."""
    prompt = job.input_ids.to(loaded.device)
    with torch.inference_mode(), compress(loaded.model, job.method, storage=job.storage) as session:
        output = loaded.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1,
            min_new_tokens=job.new_tokens, max_new_tokens=job.new_tokens, pad_token_id=0,
        )  # fmt: skip
        size = session.cache.kv_bytes()
    found = {"tokens": output[:, prompt.shape[1] :].tolist(), "nominal": size.nominal_ratio, "true": size.true_ratio}
    write_text(job.path, json.dumps(found) + "\n")


def _read(path: Path) -> dict | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("tokens", "nominal", "true")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(loaded: LoadedModel, ids: torch.Tensor, method: Method, new_tokens: int, storage: str) -> str:
    what = [
        loaded.fingerprint, str(loaded.model.dtype), loaded.device.type, repr(method), new_tokens, storage,
        list(ids.shape), code_digest("evaluation/divergence"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode() + ids.numpy().tobytes()).hexdigest()[:24]
