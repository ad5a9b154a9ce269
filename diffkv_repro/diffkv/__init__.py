"""DiffKV (SOSP 2025): the compression policy and its calibration."""

from diffkv_repro.diffkv.policy import CompressionPolicy

__all__ = ["CompressionPolicy"]
