"""What a finished answer depends on, so that it is only used again where it would come out the same."""

import hashlib
import json
from typing import Any

from diffkv_repro.cache.method import Method
from diffkv_repro.core.finished import Finished
from diffkv_repro.core.provenance import package_versions
from diffkv_repro.evaluation.digest import code_digest
from diffkv_repro.evaluation.methods import parameters
from diffkv_repro.models import LoadedModel

__all__ = ["Finished", "identity_of"]

_CODE = ("evaluation/decoding", "evaluation/generation", "evaluation/lm_eval_model")


def identity_of(loaded: LoadedModel, method: Method, storage: str, *, code: tuple[str, ...] = _CODE) -> dict[str, Any]:
    """What every answer depends on: weights, tokenizer, dtype, device, method, storage, libraries, and this code."""
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    return {
        "model": loaded.fingerprint,
        "tokenizer": _tokenizer_digest(loaded.tokenizer),
        "dtype": str(loaded.model.dtype),
        "device": loaded.device.type,
        "method": parameters(method),
        "storage": storage,
        "versions": versions,
        "code": code_digest(*code, *method.code)[:16],
    }


def _tokenizer_digest(tokenizer: Any) -> str:
    document: dict[str, Any] = {"vocabulary": tokenizer.get_vocab()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        # Not its padding, truncation and choice of a padding token: they are left by whoever used it last.
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model"):
            document[name] = parts.get(name)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
