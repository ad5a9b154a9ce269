"""Identity of the code that a kept result depends on, so that no result outlives the code that made it."""

from diffkv_repro.core.code import modules_digest

_COMPRESSED_CACHE = (
    "attention_stats/*",
    "baselines/*",
    "cache/*",
    "core/hadamard",
    "core/packing",
    "core/precision",
    "core/quantize",
    "core/vectors",
    "diffkv/policy",
    "diffkv/rules",
    "models/*",
)


def code_digest(*modules: str) -> str:
    """Of the compressed cache and all below it, and of ``modules`` as ``evaluation/generation``.

    Raises ValueError for a module that is not there.
    """
    return modules_digest(*_COMPRESSED_CACHE, *modules)
