"""``diffkv-repro explore``: notebook 15 as an app in the browser."""

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from diffkv_repro.cli_errors import fail, guarded


def explore(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8866,
    host: Annotated[str, typer.Option(help="Address to listen at; one that others can reach needs --expose.")] = "",
    model: Annotated[str | None, typer.Option(help="Bundled name, folder, .gguf file or hub id.")] = None,
    expose: Annotated[
        bool, typer.Option("--expose", help="Allow an address that others can reach. There is no password.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Serve the explorers of notebook 15 as an app, on this machine only; Ctrl+C ends it.

    Example: diffkv-repro explore --port 8866 --no-browser
    """
    from diffkv_repro.explore import app

    with tempfile.TemporaryDirectory(prefix="diffkv-repro-explore-") as folder:
        command = guarded(
            app.serve, Path(folder), host=host or app.LOOPBACK, port=port, exposed=expose, browser=browser, model=model
        )  # fmt: skip
        typer.echo(f"http://{host or app.LOOPBACK}:{port} (the page is ready when its figures are; Ctrl+C ends it)")
        process = subprocess.Popen(command, env=app.voila_environment())
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            status = process.wait(20)
        if status not in (0, -15, 130, 143):
            fail(f"voila ended with status {status}", code=1)
