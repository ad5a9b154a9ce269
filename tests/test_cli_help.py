"""Every command explains itself, with an example whose options exist."""

import re
import shlex

import click
import pytest
import typer
from typer.testing import CliRunner

from diffkv_repro.cli import app

# After "Example", perhaps with a word on it; up to a semicolon or an empty line.
EXAMPLE = re.compile(r"Example[^:]*:\s+(diffkv-repro .*?)(?:;|\n\s*\n|\Z)", re.DOTALL)


def walk(command, path=()):
    if hasattr(command, "commands"):
        for name, own in command.commands.items():
            yield from walk(own, (*path, name))
    else:
        yield path, command


COMMANDS = list(walk(typer.main.get_command(app)))


@pytest.fixture(params=COMMANDS, ids=lambda found: " ".join(found[0]))
def found(request):
    return request.param


def test_the_commands_are_found():
    names = {" ".join(path) for path, _ in COMMANDS}
    assert {"reproduce", "check", "figures", "doctor", "explore", "lm-eval run", "bench memory"} <= names


def test_help_has_an_example_with_options_that_exist(found):
    path, command = found
    example = EXAMPLE.search(command.help)
    assert example, f"{' '.join(path)} has no example in its help"
    words = shlex.split(example[1].replace("\b", " "))
    assert tuple(words[1 : 1 + len(path)]) == path
    context = type(command).context_class(command, info_name=path[-1], **command.context_settings)
    try:
        command.parse_args(context, words[1 + len(path) :])
    except click.ClickException as error:
        raise AssertionError(f"{example[1]}: {error.message}") from error


def test_help_is_printed(found):
    path, command = found
    if not command.add_help_option:
        pytest.skip("lm-eval prints its own help")
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    for option in command.params:
        said = getattr(option, "help", True) or getattr(option, "hidden", False)
        assert said, f"{' '.join(path)}: {option.name} says nothing"
