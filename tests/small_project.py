"""A small project of its own: three claims, notebooks that do what a test wants of them."""

import nbformat

CLAIMS = """
figures:
  diffkv-fig90:
    paper: DiffKV
    title: Ninety
    notebook: 90_good
    paper_says: It is nine.
    claims:
      - id: diffkv-fig90-nine
        statement: It is nine.
        kind: exact
        metric: nine
        compare: ==
        expected: 9
        any_size: true
      - {id: diffkv-fig90-big, statement: It is big., kind: trend, metric: big, compare: ">=", expected: 5}
  diffkv-fig91:
    paper: DiffKV
    title: Ninety-one
    notebook: 91_other
    paper_says: Nothing.
    claims:
      - id: diffkv-fig91-one
        statement: It is one.
        kind: exact
        metric: one
        compare: ==
        expected: 1
        any_size: true
  diffkv-fig92:
    paper: DiffKV
    title: Ninety-two
    notebook: 92_absent
    paper_says: Nothing.
    claims:
      - {id: diffkv-fig92-far, statement: Far., kind: reported, metric: far, why: too far, needs: a rocket}
"""

PARAMETERS = 'profile = "cpu"\noutput = "out"\nseed = 0\n'
GOOD = """
from diffkv_repro.study import Measurement, Study
study = Study("90_good", profile=profile, output=output, seed=seed)
study.publish("diffkv-fig90", None, {"nine": Measurement(nine), "big": Measurement(7.5)})
study.check()
"""
OTHER = GOOD.replace("90_good", "91_other").replace("diffkv-fig90", "diffkv-fig91")
OTHER = OTHER.replace('{"nine": Measurement(nine), "big": Measurement(7.5)}', '{"one": Measurement(1)}')


def write_notebook(path, parameters, *cells):
    notebook = nbformat.v4.new_notebook()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    notebook.cells = [first, *(nbformat.v4.new_code_cell(cell) for cell in cells)]
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


def write_project(root):
    """The whole project in the folder ``root``."""
    (root / "claims.yaml").write_text(CLAIMS)
    write_notebook(root / "notebooks" / "90_good.ipynb", PARAMETERS + "nine = 9\n", GOOD)
    write_notebook(root / "notebooks" / "91_other.ipynb", PARAMETERS, OTHER)
    (root / "notebooks" / "profiles.yaml").write_text("smoke: {}\ncpu: {}\n")
