"""Texts to measure on: bundled with the interpreter, from a folder, or from the hub."""

from diffkv_repro.workloads.texts import Document, TextError, load_texts, source_name
from diffkv_repro.workloads.windows import Window, digest, windows

__all__ = ["Document", "TextError", "Window", "digest", "load_texts", "source_name", "windows"]
