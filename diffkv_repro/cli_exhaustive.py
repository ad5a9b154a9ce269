"""``diffkv-repro exhaustive``: a whole space evaluated, to judge searches by."""

from pathlib import Path
from typing import Annotated

import typer

from diffkv_repro.cli_errors import guarded


def exhaustive(
    output: Annotated[Path, typer.Option("--output", "-o", help="The table to write, JSON.")],
    model: Annotated[str, typer.Option(help="Bundled name, folder, .gguf file or hub id.")] = "smollm2-135m",
    workload: Annotated[
        list[str] | None, typer.Option(help="prose, code, dialogue, a folder, hub:...; may be repeated.")
    ] = None,
    space: Annotated[str, typer.Option(help="Space of profiles, as reduced or artifact.")] = "reduced",
    documents: Annotated[int, typer.Option(min=1, help="Documents of each workload.")] = 5,
    most: Annotated[int | None, typer.Option(min=1, help="Only so many of all documents, the first.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a document, its continuation included.")] = 384,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens to say.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the choice of documents.")] = 0,
) -> None:
    """Score every profile of a space on every document; scores are kept, and the command goes on where it stopped.

    Example, which made the table that notebook 11 reads:
    diffkv-repro exhaustive --most 12 -o figures/recorded/exhaustive/reduced.json
    """
    from diffkv_repro.core.paths import cache_dir
    from diffkv_repro.core.threads import one_thread
    from diffkv_repro.evaluation.profiling import load_workload
    from diffkv_repro.kvserve.exhaustive import evaluate_all
    from diffkv_repro.kvserve.space import space as named

    candidates = guarded(named, space)
    sources = workload or ["prose", "code", "dialogue"]
    ready = guarded(load_workload, model, sources, count=documents, tokens=tokens, continuation=continuation, seed=seed)
    with one_thread():
        found = guarded(
            evaluate_all, ready.loaded, candidates, ready.documents, ready.assets,
            store=cache_dir() / "exhaustive" / "scores.sqlite", settings=ready.settings | {"most": most}, most=most,
            watch=lambda done, total: typer.echo(f"document {done} of {total}", err=True),
        )  # fmt: skip
    typer.echo(f"written: {guarded(found.save, output)}, {len(found.ids)} profiles on {len(found.sources)} documents")
