"""The app: a copy of notebook 15 without what only its claims need, on this machine only."""

import json
import socket

import nbformat
import pytest
from typer.testing import CliRunner

from diffkv_repro.cli import app as commands
from diffkv_repro.explore.app import app_notebook, is_loopback, require_host, serve, voila_command


def code(path):
    document = nbformat.read(path, as_version=4)
    nbformat.validate(document)
    return [cell.source for cell in document.cells if cell.cell_type == "code"]


def test_the_copy_measures_no_claim_and_has_every_explorer(tmp_path):
    text = "\n".join(code(app_notebook(tmp_path)))
    assert "publish(" not in text
    assert "study.check" not in text
    for name in ("policy", "bandwidth", "compare"):
        assert f"explore.{name}_explorer(" in text
    assert "explore.page_inspector(" in text
    compile(text, "app", "exec")


def test_another_model_is_a_plain_literal(tmp_path):
    name = 'it\'s "mine"\n'
    (parameters,) = [cell for cell in code(app_notebook(tmp_path, name)) if cell.startswith("profile =")]
    names = {}
    exec(parameters, names)
    assert names["model"] == name
    assert names["n_texts"] == 0


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.9.1", True),
                                           ("0.0.0.0", False), ("::", False), ("10.1.2.3", False), ("", False),
                                           ("no such host", False)])  # fmt: skip
def test_what_is_loopback(host, own):
    assert is_loopback(host) == own


def test_other_machines_are_kept_out_unless_meant():
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 can be reached from other machines"):
        require_host("0.0.0.0", exposed=False)
    require_host("0.0.0.0", exposed=True)
    done = CliRunner().invoke(commands, ["explore", "--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert "--expose" in done.stderr


def test_a_taken_port_is_said_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be listened at: .*; choose another --port"):
            serve(tmp_path, host="127.0.0.1", port=port, exposed=False, browser=False)
    assert not list(tmp_path.iterdir())


def test_voila_is_bound_to_the_address(tmp_path):
    command = voila_command(tmp_path / "n.ipynb", "127.0.0.1", 8866, browser=False)
    assert "--Voila.ip=127.0.0.1" in command
    assert "--port=8866" in command
    assert "--no-browser" in command


def test_the_tags_are_those_of_the_notebook(tmp_path):
    document = json.loads(app_notebook(tmp_path).read_text())
    assert all("not-in-app" not in cell["metadata"].get("tags", ()) for cell in document["cells"])
