import pytest
from tiny import save, tiny_gemma3, tiny_llama

from diffkv_repro.models import load_model


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """A tiny model in a folder, so that copied code can load it too."""
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("tiny-llama"))))


@pytest.fixture(scope="session")
def sliding(tmp_path_factory):
    """One with two sliding-window layers of three."""
    return load_model(str(save(tiny_gemma3(), tmp_path_factory.mktemp("tiny-gemma"))))
