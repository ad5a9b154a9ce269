import pytest


@pytest.fixture(autouse=True)
def torch_twins(monkeypatch):
    """The engine on a CPU as users have it: the kernels' twins, not Triton's interpreter, which tests/kernels uses."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
