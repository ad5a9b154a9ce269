import pytest
from small_project import write_project


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The root of a small project; the package reads it instead of the clone it was installed from."""
    write_project(tmp_path)
    monkeypatch.setenv("DIFFKV_REPRO_ROOT", str(tmp_path))
    return tmp_path
