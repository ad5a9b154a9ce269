"""The lock file, pyproject.toml and environment.yml agree, and the name ``kernels`` is left to its owner."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from rattler import MatchSpec

from diffkv_repro.doctor import locked_versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if re.match(r"[A-Za-z]", line)
]


def direct(*extras):
    names = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in names]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def conda():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    return [entry for entry in dependencies if isinstance(entry, str)], pip


def test_lock_is_exact_and_covers_every_direct_dependency():
    assert all(len(r.specifier) == 1 and next(iter(r.specifier)).operator == "==" for r in LOCK)
    locked = {normal(r.name): r for r in LOCK}
    for requirement in direct("gpu", "ray", "benchmarks", "dev"):
        if requirement.name.startswith("nvidia"):
            continue  # of the CUDA libraries torch's own wheel decides
        version = next(iter(locked[normal(requirement.name)].specifier)).version
        assert requirement.specifier.contains(version), f"{requirement} against locked {version}"


def test_lock_leaves_the_cuda_libraries_to_the_wheel_of_torch():
    assert not [r.name for r in LOCK if r.name.startswith(("nvidia", "cuda"))]


def test_environment_yml_resolves_to_the_locked_versions():
    _, pip = conda()
    assert "--constraint requirements.lock" in pip
    assert pip[-1] == "-e ."
    pins = {normal(r.name): r for r in map(Requirement, (line for line in pip if not line.startswith("-")))}
    locked = {normal(r.name): r for r in LOCK}
    assert set(pins) == {normal(r.name) for r in direct("gpu")}
    for name, pin in pins.items():
        assert (pin.specifier, str(pin.marker)) == (locked[name].specifier, str(locked[name].marker))


def test_environment_yml_is_what_conda_reads():
    specs = {spec.name.normalized: spec for spec in map(MatchSpec, conda()[0])}
    assert set(specs) == {"python", "pip"}
    assert str(specs["python"].version) == PROJECT["requires-python"]


def test_the_packages_the_user_named_are_all_there():
    named = {
        "jupyterlab",
        "papermill",
        "torch",
        "transformers",
        "datasets",
        "lm-eval",
        "triton",
        "plotly",
        "ipywidgets",
    }
    assert named <= {normal(r.name) for r in direct("gpu")}


def test_this_environment_is_the_locked_one():
    locked = locked_versions(ROOT / "requirements.lock")
    needed = {r.name for r in direct("dev") if r.marker is None or r.marker.evaluate()}
    for name, version in locked.items():
        try:
            assert importlib.metadata.version(name).partition("+")[0] == version, name
        except importlib.metadata.PackageNotFoundError:
            assert name not in needed


def run(code, cwd=ROOT, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, env=environment or None
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_import_kernels_from_the_root_does_not_find_ours():
    status, _, errors = run("import kernels")
    assert status == 1
    assert "ModuleNotFoundError: No module named 'kernels'" in errors
    status, _, errors = run("from kernels import get_kernel")
    assert status == 1
    assert "ModuleNotFoundError" in errors


@pytest.mark.parametrize("first", ["", "import transformers\n", "import diffkv_repro.kernels\n"])
def test_nor_does_any_other_way_to_import(first):
    code = first + "import importlib\ntry: importlib.import_module('kernels')\nexcept ImportError: print('none')"
    assert run(code)[:2] == (0, "none")


def test_transformers_loads_from_the_root_and_sees_no_kernels_of_ours():
    code = (
        "from transformers import LlamaModel\n"
        "from transformers.utils import is_kernels_available\n"
        "import importlib.util, diffkv_repro.kernels as ours\n"
        "print(is_kernels_available(), importlib.util.find_spec('kernels'), ours.__name__)"
    )
    assert run(code) == (0, "False None diffkv_repro.kernels", "")


def test_the_owner_of_the_name_wins(tmp_path):
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kernels.hub import get_kernel\n")
    (package / "hub.py").write_text("def get_kernel(): return 'theirs'\n")
    code = f"import sys; sys.path.append({str(package.parent)!r})\nimport kernels; print(kernels.get_kernel())"
    assert run(code) == (0, "theirs", "")
