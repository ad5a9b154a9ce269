"""``load_model``: a bundled name, a folder, a GGUF file or a Hugging Face hub id, ready to measure."""

import dataclasses
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

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.files import sha256_of
from diffkv_repro.models.hf import AttentionLayout, attention_layout
from diffkv_repro.models.weights import PACKAGED, ModelError, gguf_folder, manifest_of, packaged_folder


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer, and what identifies it.

    ``name`` is what it was asked for by, without the folders of a path.
    ``precision`` says in words what the weights are; ``fingerprint`` changes when the weights do. ``source`` is what
    :func:`load_model` would take to load it again, None for a model that is not on disk.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: AttentionLayout
    precision: str
    fingerprint: str
    source: str | None = None

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
    dtype = dtype or default_dtype(device)
    source, precision = _locate(name)
    config = _config(name, source)
    _require_causal(name, config)
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
    _require_complete(name, report)
    layout = attention_layout(model)
    model = model.to(device).eval().requires_grad_(False)
    kept = str(dtype).removeprefix("torch.")
    return LoadedModel(
        name=_public_name(name),
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        precision=precision if precision and dtype == torch.float32 else f"{precision or 'as published'}, in {kept}",
        fingerprint=weights_fingerprint(source, config),
        source=name,
    )


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 on CUDA, else float32."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def untrained_twin(loaded: LoadedModel, *, seed: int = 0, sharpness: float = 4.0) -> LoadedModel:
    """The same architecture with random weights: a control for what training has to do with a measurement.

    Freshly initialised attention is almost even, so the query and key projections are multiplied by
    ``sharpness``, which makes it uneven by chance.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data.mul_(sharpness)
    model = model.to(device=loaded.device, dtype=loaded.model.dtype).eval().requires_grad_(False)
    return dataclasses.replace(
        loaded,
        name=f"untrained twin of {loaded.name}",
        model=model,
        precision="random",
        source=None,
        fingerprint=f"random:{seed}:{sharpness}:{hashlib.sha256(loaded.model.config.to_json_string().encode()).hexdigest()[:16]}",
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
            f"configuration transformers knows, and not to be had from the hub: {first_line(error)}"
        ) from error


def _require_causal(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelError(f"model {name!r} is an encoder-decoder ({config.model_type}), not a causal language model")
    if vars(config).get("is_decoder") is False:  # only families of encoders carry the switch
        raise ModelError(
            f"model {name!r} ({config.model_type}) is an encoder: its is_decoder is off, so it is not causal"
        )
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    names = config.architectures or [causal]
    if causal is None or causal not in names:
        raise ModelError(
            f"model {name!r} ({config.model_type}, {', '.join(map(str, names))}) is not a causal language model"
        )


def _require_complete(name: str, report: dict) -> None:
    """transformers fills what a checkpoint lacks with random weights, and only logs it."""
    lacking = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report.get(kind) or ())
    if lacking:
        raise ModelError(
            f"missing weights: model {name!r} lacks {len(lacking)} tensors of its configuration, as {lacking[0]}"
        )


def _public_name(name: str) -> str:
    """``name`` for provenance: a path without its folders, never to be taken for a bundled model."""
    path = Path(name).expanduser()
    if name in PACKAGED or not path.exists():
        return name
    return f"./{path.name}" if path.name in PACKAGED else path.name


def weights_fingerprint(source: str, config: PreTrainedConfig) -> str:
    """Identity of the weights of a folder or hub id: a checksum of configuration and weights, or the hub's commit."""
    folder = Path(source)
    if not folder.is_dir():
        return f"{source}@{config._commit_hash}"
    manifest = manifest_of(folder)
    if manifest:
        return f"gguf-sha256:{manifest['gguf_sha256'][:16]}"
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    digest = hashlib.sha256("".join(f"{path.name} {sha256_of(path)} " for path in files).encode())
    return f"sha256:{digest.hexdigest()[:16]}"


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
