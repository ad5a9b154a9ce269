"""``diffkv-repro serve``: disaggregated serving in two terminals, and a prefix store."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from diffkv_repro.cli_errors import fail, guarded


class _Interruptible(typer.core.TyperGroup):
    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("interrupted", code=130)


serve = typer.Typer(
    cls=_Interruptible, no_args_is_help=True, help="Prefill in one process, decode in another, KV caches between them."
)

PROFILES = "int4,kivi-2bit,kivi-4bit,cachegen-1"
Endpoint = Annotated[str, typer.Option(help="Where the server listens, as tcp://127.0.0.1:5750.")]
KeyFolder = Annotated[Path | None, typer.Option("--keys", help="Folder of keys; by default that of `serve keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No keys and no encryption: lets everybody in.")]
Model = Annotated[str, typer.Option(help="Bundled name, folder, .gguf file or hub id.")]
Parent = Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when standard input is closed.")]
Shape = Annotated[str | None, typer.Option("--made-up", help="LAYERSxHEADSxDIM of random KV instead of a model.")]
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5750"
_CHARACTERS = 100_000


@serve.command()
def keys(
    folder: KeyFolder = None,
    replace: Annotated[bool, typer.Option("--replace", help="Make new ones where there are keys already.")] = False,
) -> None:
    """Make the keys with which servers and clients know each other, readable by you alone.

    Example: diffkv-repro serve keys
    """
    from diffkv_repro.kvserve.keys import make_keys

    made = guarded(make_keys, _folder(folder), replace=replace)
    for path in made:
        typer.echo(path)


@serve.command()
def prefill(
    model: Model = "smollm2-135m",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_folder: KeyFolder = None,
    insecure: Insecure = False,
    profiles: Annotated[str, typer.Option(help="Names of profiles to choose from.")] = PROFILES,
    gbps: Annotated[float | None, typer.Option(min=0, help="Shape the link to so many Gbit/s.")] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of the prompt that profiles are measured on.")] = 512,
    judge: Annotated[bool, typer.Option(help="Measure what profiles do to the model's text.")] = True,
    made_up: Shape = None,
    experiment: Annotated[bool, typer.Option("--experiment", help="Clients may choose profile and rate.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds of silence after which a client is given up.")] = 5.0,
    with_parent: Parent = False,
) -> None:
    """Prefill worker: computes KV caches and sends them by the profile that the controller chooses for each.

    Example: diffkv-repro serve prefill --gbps 1 --profiles int4,cachegen-1
    """
    from diffkv_repro.kvserve import serving
    from diffkv_repro.kvserve.disagg import PrefillWorker

    link = _Link.checked(endpoint, key_folder, insecure, gbps, patience, with_parent)
    text = _text()
    source = guarded(serving.open_source, model, made_up, text)
    given, measured = guarded(serving.measured_profiles, source, _names(profiles), tokens, text=text, judge=judge)
    typer.echo(serving.words_of(measured, judged=judge and made_up is None))
    worker = guarded(PrefillWorker, source, given, measured)
    link.serve_caches(worker, experiment=experiment)


@serve.command()
def store(
    folder: Annotated[Path, typer.Argument(help="Folder of stored caches.")],
    model: Model = "smollm2-135m",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_folder: KeyFolder = None,
    insecure: Insecure = False,
    profiles: Annotated[str, typer.Option(help="Names of profiles to keep each prompt in, besides none.")] = PROFILES,
    limit_gb: Annotated[float, typer.Option(min=0.001, help="Size at which the least recently used go.")] = 4.0,
    gbps: Annotated[float | None, typer.Option(min=0, help="Shape the link to so many Gbit/s.")] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of the prompt that profiles are measured on.")] = 512,
    judge: Annotated[bool, typer.Option(help="Measure what profiles do to the model's text.")] = True,
    add: Annotated[
        list[Path] | None, typer.Option(help="Text file whose cache to store first; may be repeated.")
    ] = None,
    made_up: Shape = None,
    experiment: Annotated[bool, typer.Option("--experiment", help="Clients may choose profile and rate.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds of silence after which a client is given up.")] = 5.0,
    with_parent: Parent = False,
) -> None:
    """Prefix store: sends the longest stored prefix of a prompt, in the form that arrives first at this bandwidth.

    Example: diffkv-repro serve store kv-store --add README.md --gbps 1
    """
    from diffkv_repro.kvserve import serving
    from diffkv_repro.kvserve.store import PrefixStore
    from diffkv_repro.kvserve.store_worker import StoreWorker

    link = _Link.checked(endpoint, key_folder, insecure, gbps, patience, with_parent)
    text = _text()
    source = guarded(serving.open_source, model, made_up, text)
    given, measured = guarded(serving.measured_profiles, source, _names(profiles), tokens, text=text, judge=judge)
    typer.echo(serving.words_of(measured, judged=judge and made_up is None))
    kept = guarded(PrefixStore, folder, source.layout, limit_bytes=int(limit_gb * 1e9))
    texts = {path.name: guarded(path.read_text, encoding="utf-8") for path in add or []}
    guarded(serving.fill_store, kept, source, given, texts, typer.echo)
    typer.echo(f"{len(kept.entries)} caches in {folder}, {kept.nbytes / 1e6:.1f} MB")
    worker = guarded(StoreWorker, kept, measured[max(measured)])
    link.serve_caches(worker, experiment=experiment)


@serve.command()
def frames(
    folder: Annotated[Path, typer.Argument(help="Folder of frames.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_folder: KeyFolder = None,
    insecure: Insecure = False,
    limit_gb: Annotated[float, typer.Option(min=0.001, help="Size at which the least recently used go.")] = 4.0,
    gbps: Annotated[float | None, typer.Option(min=0, help="Shape the link to so many Gbit/s, each way.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds of silence after which a client is given up.")] = 5.0,
    with_parent: Parent = False,
) -> None:
    """Store of frames for vLLM instances that share no folder: they keep and find them by name. Needs no model.

    Example: diffkv-repro serve frames kv-frames
    """
    from diffkv_repro.kvserve.frame_server import FrameServer
    from diffkv_repro.kvserve.frame_store import FolderStore

    link = _Link.checked(endpoint, key_folder, insecure, gbps, patience, with_parent)
    link.serve(FrameServer, guarded(FolderStore, folder, most_bytes=limit_gb * 1e9), say_line=typer.echo)


@serve.command()
def decode(
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; may be repeated.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="Text file to use as a prompt; may be repeated.")] = None,
    model: Model = "smollm2-135m",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_folder: KeyFolder = None,
    insecure: Insecure = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 24,
    slo: Annotated[float, typer.Option(help="Seconds until the cache has to be here.")] = float("inf"),
    min_quality: Annotated[float, typer.Option(min=0, help="Least quality, relative to no compression.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Times to ask each prompt.")] = 1,
    in_turn: Annotated[bool, typer.Option("--in-turn", help="Encode, send and decode one after another.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds of silence after which the server is given up.")] = 5.0,
    local: Annotated[bool, typer.Option("--local", help="Ask nobody: prefill here too.")] = False,
) -> None:
    """Decode worker: fetches the cache of each prompt, or computes it where that fails, and goes on from it.

    Example: diffkv-repro serve decode --prompt "The quick brown fox" --tokens 12
    """
    from diffkv_repro.kvserve import serving

    texts = list(prompt or []) + [guarded(path.read_text, encoding="utf-8") for path in file or []]
    if not texts:
        fail("nothing to do: give a --prompt or a --file")
    given = None if local or insecure else _keys(key_folder, "client")
    terms = {"slo": slo, "min_quality": min_quality, "overlap": not in_turn}
    guarded(
        serving.decode_texts, model, [text for text in texts for _ in range(repeat)], tokens, typer.echo,
        endpoint=None if local else endpoint, keys=given, patience=patience, terms=terms,
    )  # fmt: skip


def _text() -> str:
    from diffkv_repro.workloads import load_texts

    text = ""
    for document in load_texts("prose"):  # one alone is too short to measure a long prompt on
        text += document.text + "\n\n"
        if len(text) > _CHARACTERS:
            break
    return text


def _names(listed: str) -> list[str]:
    return [name for name in listed.split(",") if name]


def _folder(folder: Path | None) -> Path:
    from diffkv_repro.core.paths import cache_dir

    return folder or cache_dir() / "keys"


def _keys(folder: Path | None, role: str):
    from diffkv_repro.kvserve.keys import load_keys

    return guarded(load_keys, _folder(folder), role)


@dataclass(frozen=True)
class _Link:
    """How a server listens; :meth:`checked` before it measures anything, which takes minutes."""

    options: dict
    gbps: float | None
    with_parent: bool

    @classmethod
    def checked(cls, endpoint: str, folder: Path | None, insecure: bool, gbps: float | None, patience: float,
                with_parent: bool) -> "_Link":  # fmt: skip
        from diffkv_repro.kvserve.link import LinkSettings
        from diffkv_repro.kvserve.link_server import require_free
        from diffkv_repro.kvserve.shaper import Shaper

        keys = None if insecure else _keys(folder, "server")
        settings = guarded(LinkSettings, patience=patience)
        shaper = guarded(Shaper, None if gbps is None else gbps * 1e9 / 8)
        guarded(require_free, endpoint, keys)
        return cls({"keys": keys, "endpoint": endpoint, "settings": settings, "shaper": shaper}, gbps, with_parent)

    def serve_caches(self, worker, *, experiment: bool) -> None:
        from diffkv_repro.kvserve.server import KVServer
        from diffkv_repro.kvserve.serving import describe

        self.serve(KVServer, worker, experiment=experiment, on_served=lambda report: typer.echo(describe(report)))

    def serve(self, kind, what, **options) -> None:
        """Until a signal comes, or with a parent its end."""
        server = guarded(kind, what, **self.options, **options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        if self.with_parent:
            threading.Thread(target=_at_the_end_of_input, args=(server.stop,), daemon=True).start()
        how = "encrypted" if self.options["keys"] else "NOT encrypted"
        shaped = "" if self.gbps is None else f", shaped to {self.gbps:g} Gbps"
        typer.echo(f"listening on {server.endpoint}, {how}{shaped}")
        server.run()
        typer.echo("stopped")


def _at_the_end_of_input(stop) -> None:
    # Not through sys.stdin: Python aborts where a thread holds its lock while the interpreter ends.
    while os.read(0, 4096):
        pass
    stop()
