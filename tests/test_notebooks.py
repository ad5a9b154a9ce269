"""The notebooks' form: thin cells, no outputs, one parameters cell, a last check, and links that lead somewhere."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from diffkv_repro.study.notebooks import PROFILES, RESERVED, find_notebooks, parameters_for, profile_parameters

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = find_notebooks(ROOT)


def cells_of(notebook, kind=None):
    found = nbformat.read(notebook.path, as_version=4)
    nbformat.validate(found)
    return [cell for cell in found.cells if kind in (None, cell.cell_type)]


@pytest.fixture(params=NOTEBOOKS, ids=lambda notebook: notebook.name)
def notebook(request):
    return request.param


def test_committed_without_outputs(notebook):
    for cell in cells_of(notebook, "code"):
        assert not cell.outputs
        assert cell.execution_count is None


def test_cells_are_short_and_explained(notebook):
    code, prose = cells_of(notebook, "code"), cells_of(notebook, "markdown")
    assert max(len(cell.source.splitlines()) for cell in code) <= 25
    assert len(prose) >= len(code)


def test_opens_with_a_finding_and_ends_with_its_claims(notebook):
    cells = cells_of(notebook)
    assert re.match(r"# \S", cells[0].source)
    assert [cell for cell in cells if cell.cell_type == "code"][-1].source == "study.check()"


def test_names_itself(notebook):
    code = "\n".join(cell.source for cell in cells_of(notebook, "code"))
    assert f'Study("{notebook.name}"' in code


def test_every_parameter_is_used(notebook):
    code = "\n".join(cell.source for cell in cells_of(notebook, "code"))
    read = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert set(notebook.parameters) <= read


def test_defaults_never_touch_the_committed_figures(notebook):
    assert notebook.parameters["output"] == "results/interactive"
    assert notebook.parameters["profile"] == "cpu"


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_give_only_what_notebooks_know(profile):
    given = profile_parameters(ROOT, profile)
    by_name = {notebook.name: notebook for notebook in NOTEBOOKS}
    assert set(given) <= set(by_name)
    for name, notebook in by_name.items():
        handed = parameters_for(
            notebook, profile=profile, given=given.get(name, {}), output=ROOT / "x", seed=0, extra={}
        )
        assert set(RESERVED) <= set(handed)
