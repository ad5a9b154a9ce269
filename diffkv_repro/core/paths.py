"""Where the project and its caches live."""

import os
from pathlib import Path

import platformdirs


def project_root() -> Path:
    """The clone that holds ``claims.yaml`` and ``notebooks/``.

    ``DIFFKV_REPRO_ROOT`` wins; else the folder above the package (an editable install), else the working
    directory and its parents. Raises FileNotFoundError where none of them holds ``claims.yaml``.
    """
    named = os.environ.get("DIFFKV_REPRO_ROOT")
    here = Path.cwd()
    candidates = [Path(named)] if named else [Path(__file__).resolve().parents[2], here, *here.parents]
    for folder in candidates:
        if (folder / "claims.yaml").is_file():
            return folder.resolve()
    raise FileNotFoundError(
        f"no claims.yaml in {', '.join(map(str, candidates))}; run inside a clone of diffkv-repro, "
        "or set DIFFKV_REPRO_ROOT to one"
    )


def cache_dir() -> Path:
    """The user's cache folder (converted models); ``DIFFKV_REPRO_CACHE`` overrides it."""
    named = os.environ.get("DIFFKV_REPRO_CACHE")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("diffkv-repro"))
