"""Triton kernels of the compressed KV cache, imported as ``diffkv_repro.kernels``.

The bare name ``kernels`` belongs to Hugging Face's package, which transformers imports. Python puts
the working directory on ``sys.path``, so in the repository root that name would find this folder:
the guard below then hands the name to whoever owns it, and fails as usual where nobody does.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    _root = Path(__file__).resolve().parent.parent
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]
    _spec = importlib.machinery.PathFinder.find_spec(__name__, _elsewhere)
    if _spec is None or _spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
