"""The methods that DiffKV is compared with, one a file, all a :class:`~diffkv_repro.cache.method.Method`."""

from importlib import import_module

from diffkv_repro.cache.method import Method

# Name on the command line -> module and class. Imported when asked for.
BASELINES = {
    "int4": ("int4", "Int4"),
    "kivi": ("kivi", "Kivi"),
    "kvquant": ("kvquant", "KVQuant"),
    "qaq": ("qaq", "Qaq"),
    "quarot": ("quarot", "QuaRot"),
    "h2o": ("h2o", "H2O"),
    "snapkv": ("snapkv", "SnapKV"),
    "pyramidkv": ("pyramidkv", "PyramidKV"),
    "duoattention": ("duoattention", "DuoAttention"),
    "quest": ("quest", "Quest"),
    "threshold": ("budgets", "Threshold"),
    "equal-budget": ("budgets", "EqualBudget"),
    "coverage": ("budgets", "Coverage"),
}


def baseline(name: str) -> type[Method]:
    """The class of the method ``name``. Raises ValueError for an unknown one."""
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; allowed are {', '.join(BASELINES)}")
    module, kind = BASELINES[name]
    return getattr(import_module(f"diffkv_repro.baselines.{module}"), kind)
