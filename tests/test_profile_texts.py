"""Every profile asks the bundled texts for no more windows than they hold.

With the tokenizer of the bundled model, which is the default. Runs on models or texts of the hub are left out: neither
their tokenizers nor their texts are here, so most of the profile ``full`` is not checked.
"""

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from diffkv_repro.models.weights import PACKAGED, packaged_folder
from diffkv_repro.study.notebooks import PROFILES, code_cells, find_notebooks, parameters_for, profile_parameters
from diffkv_repro.workloads import load_texts, load_windows, windows
from diffkv_repro.workloads.texts import TextError

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = {"prose", "code", "dialogue"}
CALLS = ("load_windows", "windows")


def handed(notebook, profile):
    """All parameters of a run: the notebook's own, and those of the profile."""
    given = profile_parameters(ROOT, profile).get(notebook.name, {})
    extra = {"profile": profile, "given": given, "output": ROOT / "x", "seed": 0, "extra": {}}
    return notebook.parameters | parameters_for(notebook, **extra)


def sources(parameters):
    texts = parameters["texts"]
    return {texts} if isinstance(texts, str) else set(texts)


NOTEBOOKS = [notebook for notebook in find_notebooks(ROOT) if "texts" in notebook.parameters]
RUNS = [
    pytest.param(notebook, parameters, id=f"{profile}-{notebook.name}")
    for profile in PROFILES
    for notebook in NOTEBOOKS
    if (parameters := handed(notebook, profile))["model"] in PACKAGED and sources(parameters) <= BUNDLED
]


def requests(notebook):
    """The calls for windows in a notebook, as code."""
    trees = [ast.parse("".join(cell["source"])) for cell in code_cells(notebook.path)]
    return [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
    ]


@cache
def tokenizer_of(model):
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder(PACKAGED[model]))

    @cache  # the same texts are asked for by every run
    def tokens(text, **options):
        return tokenizer(text, **options)

    return tokens


def answered(call, parameters):
    """What a call for windows gives: it may use parameters, ``loaded`` and the functions of texts."""
    names = {"load_windows": load_windows, "windows": windows, "load_texts": load_texts}
    names |= {"loaded": SimpleNamespace(tokenizer=tokenizer_of(parameters["model"]))}
    return eval(compile(ast.Expression(call), "notebook", "eval"), names | parameters)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_each_notebook_on_texts_asks_for_windows(notebook):
    assert requests(notebook)


def test_every_profile_but_that_of_the_hub_is_checked():
    checked = {run.id.split("-")[0] for run in RUNS}
    assert {"smoke", "cpu", "gpu"} <= checked


@pytest.mark.parametrize(("notebook", "parameters"), RUNS)
def test_the_windows_of_a_profile_exist(notebook, parameters):
    for call in requests(notebook):
        found = answered(call, parameters)
        for own in found.values() if isinstance(found, dict) else [found]:
            assert own


def test_more_than_the_texts_hold_is_seen():
    (notebook,) = (notebook for notebook in NOTEBOOKS if notebook.number == "05")
    call = requests(notebook)[0]
    wanted = handed(notebook, "gpu") | {"n_tokens": 1152, "prompt_tokens": 1024}
    with pytest.raises(TextError, match=r"hold only \d+ windows of 1152 tokens, 16 are wanted"):
        answered(call, wanted)
