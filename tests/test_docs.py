"""The code of README.md and docs/ runs, its commands exist, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from diffkv_repro.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [page for page in PAGES if page.name not in ("CONTRIBUTING.md", "serving-vllm.md")]
NAMES = {"reproduce", "policies", "kernels", "codec", "serving", "extend"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page):
    """Lines of its bash blocks that call this package, comments off, continued lines joined."""
    for text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if re.match(r"\S*(diffkv-repro|run_all\.sh)\b", line):
                yield shlex.split(line, comments=True)


def name(page):
    return page.name


def test_there_is_a_page_for_each_subject():
    assert {page.stem for page in PAGES} >= NAMES


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as users have it: the kernels' twins, not the interpreter
    names = {"__name__": "page"}
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_exist(page):
    for words in commands(page):
        if words[0].endswith("run_all.sh"):
            known = (ROOT / "run_all.sh").read_text()
            assert all(word in known for word in words[1:] if word.startswith("--")), words
            continue
        command, path, rest = typer.main.get_command(app), [], words[1:]
        while hasattr(command, "commands"):
            assert set(rest[:1]) & set(command.commands), " ".join(words)
            path.append(rest[0])
            command, rest = command.commands[rest[0]], rest[1:]
        context = type(command).context_class(command, info_name=path[-1], **command.context_settings)
        try:
            command.parse_args(context, rest)
        except click.ClickException as error:
            raise AssertionError(f"{' '.join(words)}: {error.message}") from error


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
