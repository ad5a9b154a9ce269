"""Models by name, each loaded once: explorers side by side share them."""

from collections import OrderedDict
from threading import Lock

from diffkv_repro.models import LoadedModel, load_model

_KEPT = 2  # a model is hundreds of megabytes and more
_models: OrderedDict[str, LoadedModel] = OrderedDict()
_lock = Lock()


def remember(loaded: LoadedModel) -> None:
    """Let :func:`model_named` find ``loaded`` by its source, or by its name where it has none."""
    with _lock:
        _put(loaded.source or loaded.name, loaded)


def model_named(name: str) -> LoadedModel:
    """``load_model(name)``, once. Raises what that raises: ModelError for a name that leads nowhere."""
    with _lock:
        if name not in _models:
            _put(name, load_model(name))
        _models.move_to_end(name)
        return _models[name]


def _put(name: str, loaded: LoadedModel) -> None:
    _models[name] = loaded
    _models.move_to_end(name)
    while len(_models) > _KEPT:
        _models.popitem(last=False)
