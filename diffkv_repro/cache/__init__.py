"""A KV cache for transformers that keeps each token at a precision of its own: what all methods share."""

from diffkv_repro.cache.method import FullPrecision, Method, Uniform
from diffkv_repro.cache.session import CompressedCache, Session, compress

__all__ = ["CompressedCache", "FullPrecision", "Method", "Session", "Uniform", "compress"]
