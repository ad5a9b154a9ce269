"""Reproduction of DiffKV (SOSP 2025) and KVServe (SIGCOMM 2026): every figure as a checked claim."""
