"""Notebook 15 in JupyterLab and as an app: every slider moves its figure, no cell is red, the console is quiet.

With a tiny model, so that it takes seconds. ``DIFFKV_REPRO_BROWSER_SWEEP=00,01,06`` runs those notebooks of the series
in JupyterLab too, with the sizes of profile smoke and the bundled model.
"""

import json
import os
import sys

import papermill
import pytest
from browser_helpers import (
    ROOT,
    SLIDERS,
    chromium,
    compare_another,
    errors,
    free_port,
    jupyterlab,
    move_every_slider,
    run_in_lab,
    serving,
)
from tiny import save, tiny_llama

from diffkv_repro.explore.app import app_notebook
from diffkv_repro.study.notebooks import find_notebooks, parameters_for, profile_parameters

SWEEP = [number for number in os.environ.get("DIFFKV_REPRO_BROWSER_SWEEP", "").split(",") if number]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    chromium()
    return save(tiny_llama(max_position_embeddings=512), tmp_path_factory.mktemp("tiny"))


def test_jupyterlab_runs_notebook_15_and_every_slider_moves_its_figure(browser, model, tmp_path):
    notebook = app_notebook(tmp_path, str(model))
    with jupyterlab(tmp_path) as address:
        run_in_lab(browser, address, notebook.name)
        assert tuple(move_every_slider(browser)) == SLIDERS
        compare_another(browser)
        assert errors(browser) == []


def test_the_app_moves_every_figure_too(browser, model, tmp_path):
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "diffkv_repro.cli",
        "explore",
        f"--port={port}",
        "--no-browser",
        f"--model={model}",
    ]
    with serving(command, port, tmp_path, DIFFKV_REPRO_ROOT=str(ROOT)) as address:
        browser.get(address)
        assert tuple(move_every_slider(browser)) == SLIDERS
        compare_another(browser)
        assert "Traceback" not in browser.page_source
        assert errors(browser) == []


@pytest.mark.skipif(not SWEEP, reason="takes minutes; DIFFKV_REPRO_BROWSER_SWEEP=00,01,06 names notebooks to open")
@pytest.mark.parametrize("number", SWEEP or ["none"])
def test_jupyterlab_runs_a_notebook_of_the_series(browser, tmp_path, number):
    (notebook,) = (one for one in find_notebooks(ROOT) if one.number == number)
    given = profile_parameters(ROOT, "smoke").get(notebook.name, {})
    parameters = parameters_for(
        notebook, profile="smoke", given=given, output=tmp_path / "out", seed=0, extra={}
    )  # fmt: skip
    document = papermill.parameterize.parameterize_notebook(
        papermill.iorw.load_notebook_node(str(notebook.path)), parameters
    )
    (tmp_path / f"{notebook.name}.ipynb").write_text(json.dumps(document))
    with jupyterlab(tmp_path) as address:
        run_in_lab(browser, address, f"{notebook.name}.ipynb", seconds=900)
        browser.save_screenshot(str(tmp_path / "screen.png"))
        assert errors(browser) == []
