"""The vLLM connector beside a stand-in for vLLM, and engines that drive it."""

import pytest
from vllm_standins import Engine, install


@pytest.fixture
def module(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def engine(module, tmp_path):
    def make(role="kv_both", extra=(), **how):
        return Engine(module, {"store": str(tmp_path / "store"), "min_tokens": 16} | dict(extra), role, **how)

    return make
