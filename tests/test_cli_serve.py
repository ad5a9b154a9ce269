"""``diffkv-repro serve``: keys are made, and what cannot work is one line instead of a traceback."""

import pytest
from typer.testing import CliRunner

from diffkv_repro.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_keys_are_made_once(tmp_path):
    done = run("keys", "--keys", tmp_path / "keys")
    assert done.exit_code == 0
    assert str(tmp_path / "keys" / "client.key_secret") in done.stdout.splitlines()
    again = run("keys", "--keys", tmp_path / "keys")
    assert again.exit_code == 2
    assert "has keys already" in again.output
    assert run("keys", "--keys", tmp_path / "keys", "--replace").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--local"), "give a --prompt or a --file"),
        (("decode", "--prompt", "x", "--keys", "absent"), "diffkv-repro serve keys"),
        (("prefill", "--made-up", "30x3"), "LAYERSxHEADSxDIM"),
        (("prefill", "--made-up", "2x1x8", "--profiles", "zip"), "unknown profile 'zip'"),
        (("prefill", "--made-up", "2x1x8", "--profiles", "int4", "--tokens", "32", "--keys", "absent"), "serve keys"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
