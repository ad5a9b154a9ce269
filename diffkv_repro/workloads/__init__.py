"""Texts to measure on: bundled with the interpreter, from a folder, or from the hub."""

from diffkv_repro.workloads.texts import Document, TextError, load_texts, source_name
from diffkv_repro.workloads.windows import Window, digest, load_windows, source_names, windows

__all__ = [
    "Document",
    "TextError",
    "Window",
    "digest",
    "load_texts",
    "load_windows",
    "source_name",
    "source_names",
    "windows",
]
