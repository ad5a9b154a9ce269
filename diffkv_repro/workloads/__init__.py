"""Texts to measure on: bundled with the interpreter, from a folder, or from the hub."""

from diffkv_repro.workloads.texts import Document, TextError, load_texts
from diffkv_repro.workloads.windows import Window, windows

__all__ = ["Document", "TextError", "Window", "load_texts", "windows"]
