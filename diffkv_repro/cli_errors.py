"""What the commands share: errors of one line, and a sign of life."""

import os
from typing import NoReturn

import typer


def fail(message: object, code: int = 2) -> NoReturn:
    typer.secho(f"diffkv-repro: {message}", fg="red", bold=True, err=True)
    raise typer.Exit(code)


def waiting(text: str):
    """A spinner on stderr, where there is a terminal to see it."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def guarded(call, *arguments, **options):
    """``call``, with the errors a user can mend as one line instead of a traceback."""
    try:
        return call(*arguments, **options)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("DIFFKV_REPRO_TRACEBACK"):
            raise
        fail(error)
