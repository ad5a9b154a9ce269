"""Triton kernels of the compressed KV cache, imported as ``diffkv_repro.kernels``.

The bare name ``kernels`` belongs to Hugging Face's package, which transformers looks for. Python puts the
working directory on ``sys.path``, so in the repository root that name would find this folder. The guard
below hands the name to its owner, and where nobody owns it behaves as if it were not installed.
"""

if __name__ == "kernels":
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    _root = Path(__file__).resolve().parent.parent
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]
    _spec = importlib.machinery.PathFinder.find_spec(__name__, _elsewhere)
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[__name__])
    else:
        # None in sys.modules is Python's own mark for "not to be had": find_spec then answers None.
        sys.modules[__name__] = None  # type: ignore[assignment]
        # transformers finds the folder with find_spec, then calls import_module unprotected to ask for a
        # version: there, and only there, the import may not raise.
        _callers = []
        _frame = sys._getframe(1)
        while _frame is not None and len(_callers) < 2:
            if "importlib._bootstrap" not in _frame.f_code.co_filename:
                _callers.append(_frame.f_globals.get("__name__", ""))
            _frame = _frame.f_back
        if _callers[:1] != ["importlib"] or not _callers[-1].startswith("transformers."):
            raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
