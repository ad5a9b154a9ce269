"""Notebook 15 as an app: a copy of it without what only its claims need, served by Voila."""

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root

NOTEBOOK = "15_policy_explorer"
NOT_IN_APP = "not-in-app"  # tag of cells that an app leaves out
LOOPBACK = "127.0.0.1"


def app_notebook(folder: Path, model: str | None = None) -> Path:
    """Write the app's notebook to ``folder``: notebook 15 without tagged cells, with another ``model`` if given.

    Raises FileNotFoundError where the project's notebooks are not there (an installation without its clone).
    """
    source = project_root() / "notebooks" / f"{NOTEBOOK}.ipynb"
    document = json.loads(source.read_text(encoding="utf-8"))
    document["cells"] = [
        cell for cell in document["cells"] if NOT_IN_APP not in cell["metadata"].get("tags", ())
    ]  # fmt: skip
    (given,) = (cell for cell in document["cells"] if "parameters" in cell["metadata"].get("tags", ()))
    lines = {"n_texts": 0, "repeats": 1} | ({} if model is None else {"model": model})
    given["source"] = [*given["source"], *(f"\n{name} = {value!r}" for name, value in lines.items())]
    return write_text(Path(folder) / f"{NOTEBOOK}.ipynb", json.dumps(document))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at ``host``; a name counts if all its addresses do."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def require_host(host: str, *, exposed: bool) -> None:
    """Raise ValueError for an address that others can reach, unless that is wanted: kernels run what a visitor asks."""
    if not exposed and not is_loopback(host):
        raise ValueError(
            f"host {host} can be reached from other machines, and the app has no password: add --expose if you mean it"
        )


def voila_command(notebook: Path, host: str, port: int, *, browser: bool) -> list[str]:
    """The command line that serves ``notebook``: kernels that nobody uses end."""
    return [
        sys.executable, "-m", "voila", str(notebook), f"--port={port}", f"--Voila.ip={host}",
        "--Voila.port_retries=0", "--show_tracebacks=True", "--MappingKernelManager.cull_idle_timeout=900",
        "--VoilaExecutor.timeout=600", *([] if browser else ["--no-browser"]),
    ]  # fmt: skip


def voila_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Variables for Voila and its kernels: the project's root, since they run in the folder of the copy."""
    return dict(os.environ if environment is None else environment) | {"DIFFKV_REPRO_ROOT": str(project_root())}


def serve(
    folder: Path, *, host: str, port: int, exposed: bool, browser: bool, model: str | None = None
) -> Sequence[str]:
    """Check everything, write the notebook, and return the command to run. Raises ValueError and OSError as above."""
    require_host(host, exposed=exposed)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be listened at: {error.strerror}; choose another --port") from error
    return voila_command(app_notebook(folder, model), host, port, browser=browser)
