"""The two storages by name."""

from diffkv_repro.cache.packed import PackedStore
from diffkv_repro.cache.simulated import SimulatedStore
from diffkv_repro.cache.store import TokenStore

STORAGES: dict[str, type[TokenStore]] = {"simulated": SimulatedStore, "packed": PackedStore}


def require_storage(storage: str) -> None:
    """Raise ValueError for an unknown storage."""
    if storage not in STORAGES:
        raise ValueError(f"unknown storage {storage!r}; allowed are {', '.join(STORAGES)}")


def make_store(storage: str, **shape) -> TokenStore:
    """A store of kind ``simulated`` or ``packed``; ``shape`` as :class:`TokenStore` takes it."""
    require_storage(storage)
    return STORAGES[storage](**shape)
