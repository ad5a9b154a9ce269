"""``load_model``: a bundled name, a folder, a GGUF file or a Hugging Face hub id, ready to measure."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from diffkv_repro.models.hf import AttentionLayout, attention_layout
from diffkv_repro.models.weights import PACKAGED, ModelError, gguf_folder, manifest_of, packaged_folder

_SAMPLE = 1 << 20


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer, and what identifies it.

    ``name`` is what it was asked for by, without the folders of a path.
    ``precision`` says in words what the weights are; ``fingerprint`` changes when the weights do.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: AttentionLayout
    precision: str
    fingerprint: str

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.device


def load_model(name: str, *, device: str | None = None, dtype: torch.dtype | None = None) -> LoadedModel:
    """Load any causal language model that transformers knows, with ``trust_remote_code`` off.

    ``name`` is a bundled model (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id. ``device`` is
    ``cuda`` where there is one, else ``cpu``; ``dtype`` is bfloat16 on CUDA, else float32 (bfloat16 is
    several times slower on CPUs without units for it).

    Raises ModelError for a name that leads nowhere, missing weights or a model that is not causal, and
    UnsupportedAttention for an attention layout that this package cannot handle.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    source, precision = _locate(name)
    config = _config(name, source)
    _require_causal(name, config)
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    layout = attention_layout(model)
    model = model.to(device).eval().requires_grad_(False)
    kept = str(dtype).removeprefix("torch.")
    return LoadedModel(
        name=Path(name).name if Path(name).expanduser().exists() else name,
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        precision=precision if precision and dtype == torch.float32 else f"{precision or 'as published'}, in {kept}",
        fingerprint=_fingerprint(source, config),
    )


def _locate(name: str) -> tuple[str, str]:
    """What to hand to from_pretrained, and a word on the precision of the weights."""
    if name in PACKAGED:
        return str(packaged_folder(PACKAGED[name])), PACKAGED[name].precision
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name!r} is a file, but not a .gguf file")
        return str(gguf_folder(path)), f"{path.name}, dequantised to float32"
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"missing weights: folder {name!r} holds no .safetensors file")
        return str(path), ""
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no file or folder {name!r}")
    return name, ""


def _config(name: str, source: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"unknown model {name!r}: not bundled ({', '.join(PACKAGED)}), not a folder or .gguf file with a "
            f"configuration transformers knows, and not to be had from the hub: {_first_line(error)}"
        ) from error


def _require_causal(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelError(f"model {name!r} is an encoder-decoder ({config.model_type}), not a causal language model")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    names = config.architectures or [causal]
    if causal is None or causal not in names:
        raise ModelError(
            f"model {name!r} ({config.model_type}, {', '.join(map(str, names))}) is not a causal language model"
        )


def _fingerprint(source: str, config: PreTrainedConfig) -> str:
    """Identity of the weights: their checksum, the hub's commit, or a sample of each file."""
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{config._commit_hash}"
    manifest = manifest_of(folder)
    if manifest:
        return f"gguf-sha256:{manifest['gguf_sha256'][:16]}"
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as handle:
            digest.update(handle.read(_SAMPLE))
            handle.seek(max(0, size - _SAMPLE))
            digest.update(handle.read(_SAMPLE))
    return f"sampled-sha256:{digest.hexdigest()[:16]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a load that takes a second; the user's own choice is put back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
