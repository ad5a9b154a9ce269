"""The numbered notebooks: which there are, what parameters they take, what each profile gives them."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROFILES = ("smoke", "cpu", "gpu", "full")
GPU_PROFILES = ("gpu", "full")
_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
# Given to every notebook by the runner, so not for profiles.yaml or --set.
RESERVED = ("profile", "output", "seed")


class NotebookError(ValueError):
    """A notebook, profile or parameter that does not exist; the message names what is allowed."""


@dataclass(frozen=True)
class Notebook:
    """One notebook of the series and the defaults of its ``parameters`` cell."""

    name: str
    path: Path
    parameters: dict[str, Any]

    @property
    def number(self) -> str:
        """Two digits: the order of the series."""
        return self.name[:2]


def notebook_path(root: Path, name: str) -> Path:
    """Where notebook ``name`` lies, built or not."""
    return root / "notebooks" / f"{name}.ipynb"


def find_notebooks(root: Path, only: str | None = None) -> list[Notebook]:
    """The series in order, or the part ``only`` names: numbers or names, comma-separated.

    Raises NotebookError for an unknown one, and where there is no notebook at all.
    """
    paths = _paths(root)
    if not paths:
        raise NotebookError(f"no notebooks in {root / 'notebooks'}")
    wanted = [word.strip() for word in (only or "").split(",") if word.strip()]
    if only is not None and not wanted:
        raise NotebookError(f"--only {only!r} names no notebook")
    for word in wanted:
        if not any(word in (path.stem, path.stem[:2]) for path in paths):
            raise NotebookError(f"unknown notebook {word!r}; there are {', '.join(path.stem for path in paths)}")
    chosen = [path for path in paths if not wanted or path.stem in wanted or path.stem[:2] in wanted]
    return [Notebook(path.stem, path, _defaults(path)) for path in chosen]


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook file, as plain data (nbformat would cost every command two seconds)."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotebookError(f"{path.name} is no notebook: {error!r}") from error


def _defaults(path: Path) -> dict[str, Any]:
    """Names and literal values of the cell tagged ``parameters``."""
    cells = [cell for cell in code_cells(path) if "parameters" in cell["metadata"].get("tags", [])]
    if len(cells) != 1:
        raise NotebookError(f"{path.name} has {len(cells)} cells tagged parameters; it must have one")
    found = {}
    try:
        statements = ast.parse("".join(cells[0]["source"])).body
    except SyntaxError as error:
        raise NotebookError(f"{path.name}: the parameters cell is not plain Python: {error.msg}") from None
    for statement in statements:
        # papermill overrides an annotated parameter only in appearance, so those are refused.
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            raise NotebookError(f"{path.name}: the parameters cell may only hold lines like name = literal")
        try:
            found[statement.targets[0].id] = ast.literal_eval(statement.value)
        except ValueError:
            raise NotebookError(f"{path.name}: parameter {statement.targets[0].id} is not a plain literal") from None
    absent = [name for name in RESERVED if name not in found]
    if absent:
        raise NotebookError(f"{path.name}: the parameters cell lacks {', '.join(absent)}")
    return found


def profile_parameters(root: Path, profile: str) -> dict[str, dict[str, Any]]:
    """What ``notebooks/profiles.yaml`` gives each notebook under ``profile``."""
    if profile not in PROFILES:
        raise NotebookError(f"unknown profile {profile!r}; there are {', '.join(PROFILES)}")
    path = root / "notebooks" / "profiles.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise NotebookError(f"profiles.yaml is not YAML: {error}") from error
    names = {notebook.stem for notebook in _paths(root)}
    _only(document, set(PROFILES), "profiles.yaml", "profile")
    for name, per_notebook in document.items():
        _only(per_notebook or {}, names, f"profiles.yaml: {name}", "notebook")
        for notebook, values in (per_notebook or {}).items():
            _only(values, None, f"profiles.yaml: {name}: {notebook}", "parameter")
    return document.get(profile) or {}


def _only(mapping: Any, allowed: set[str] | None, where: str, kind: str) -> None:
    if not isinstance(mapping, dict):
        raise NotebookError(f"{where} must map each {kind} to its values, is {mapping!r}")
    unknown = sorted(str(name) for name in mapping if allowed is not None and name not in allowed)
    if unknown:
        raise NotebookError(f"{where}: unknown {kind} {', '.join(unknown)}; there are {', '.join(sorted(allowed))}")


def _paths(root: Path) -> list[Path]:
    return sorted(path for path in (root / "notebooks").glob("*.ipynb") if _NAME.fullmatch(path.stem))


def parameters_for(
    notebook: Notebook, *, profile: str, given: dict[str, Any], output: Path, seed: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """Everything to hand to ``notebook``: its profile's values, then ``extra``, then the reserved ones.

    ``extra`` (from ``--set``) goes to each notebook that knows the name. Raises NotebookError for a name in
    ``given`` that the notebook does not know, and for a reserved one.
    """
    chosen = given | {name: value for name, value in extra.items() if name in notebook.parameters}
    unknown = sorted(set(chosen) - set(notebook.parameters))
    if unknown:
        known = ", ".join(sorted(set(notebook.parameters) - set(RESERVED)))
        raise NotebookError(f"notebook {notebook.name} has no parameter {', '.join(unknown)}; it has {known}")
    reserved = sorted(set(chosen) & set(RESERVED))
    if reserved:
        raise NotebookError(f"parameter {', '.join(reserved)} is set by the runner; use its own options")
    return chosen | {"profile": profile, "output": str(output), "seed": seed}


def parse_settings(settings: list[str], notebooks: list[Notebook]) -> dict[str, Any]:
    """``name=value`` words into typed values; raises NotebookError for a name that no notebook has.

    A value is a Python literal where it reads as one (``8``, ``0.5``, ``[1, 2]``), else the text itself.
    """
    parsed = {}
    known = sorted({name for notebook in notebooks for name in notebook.parameters} - set(RESERVED))
    for word in settings:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise NotebookError(f"--set {word!r}: must be name=value, with a name among {', '.join(known)}")
        try:
            parsed[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            # A path is the caller's; notebooks run in a folder of their own.
            parsed[name] = str(Path(text).expanduser().absolute()) if Path(text).expanduser().exists() else text
    return parsed
