"""``diffkv-repro search``: the profiles of a workload, found by the Bayesian profiling engine."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from diffkv_repro.cli_errors import fail, guarded


def search(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the search; it is created.")],
    model: Annotated[str, typer.Option(help="Bundled name, folder, .gguf file or hub id.")] = "smollm2-135m",
    workload: Annotated[
        list[str] | None, typer.Option(help="prose, code, dialogue, a folder of texts, hub:...; may be repeated.")
    ] = None,
    space: Annotated[
        str, typer.Option(help="Profiles to choose from: reduced, artifact, coarse, headwise, fine.")
    ] = "fine",
    budget: Annotated[int, typer.Option(min=1, help="Most evaluations.")] = 120,
    min_quality: Annotated[float, typer.Option(min=0, help="Least quality; 1 is the uncompressed cache's.")] = 0.97,
    documents: Annotated[int, typer.Option(min=1, help="Documents of each workload.")] = 5,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Documents that judge a candidate; all unless given.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a document, its continuation included.")] = 384,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens of it that the model is asked to say.")] = 64,
    cold_start: Annotated[int, typer.Option(min=1, help="Evaluations before the Gaussian process.")] = 8,
    acquisition: Annotated[str, typer.Option(help="paper, released or improvement.")] = "paper",
    surrogate: Annotated[str, typer.Option(help="botorch or sklearn.")] = "botorch",
    executor: Annotated[
        str, typer.Option(help="serial, processes, processes:<n>, ray, or ray://host:port.")
    ] = "processes",
    batch: Annotated[int | None, typer.Option(min=1, help="Candidates at once; one a worker unless given.")] = None,
    device: Annotated[str, typer.Option(help="Where models run: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a search in this folder stopped.")] = False,
) -> None:
    """Find the profile of the highest compression ratio that keeps the quality, and the front for the controller.

    Example, a folder of your own texts, stopped and gone on with: diffkv-repro search --workload my_texts -o my_search;
    diffkv-repro search --workload my_texts -o my_search --resume

    Writes every evaluation as it ends (evaluations.sqlite), the search (search.json) and the profiles that no other
    beats in quality, ratio and measured latency (library.json), which Controller takes by way of ProfileLibrary.load.
    """
    from diffkv_repro.evaluation.profile_search import SearchPlan, search_workload
    from diffkv_repro.evaluation.profiling import load_workload
    from diffkv_repro.kvserve.executor import require_executor
    from diffkv_repro.kvserve.search import SearchSettings
    from diffkv_repro.kvserve.space import space as named

    settings = guarded(
        SearchSettings, min_quality=min_quality, budget=budget, cold_start=cold_start, acquisition=acquisition,
        surrogate=surrogate, seed=seed,
    )  # fmt: skip
    guarded(require_executor, executor)
    plan = SearchPlan(guarded(named, space), settings, sample, executor, batch)
    ready = guarded(
        load_workload, model, workload or ["prose", "code", "dialogue"], count=documents, tokens=tokens,
        continuation=continuation, seed=seed, device=device,
    )  # fmt: skip
    try:
        with _live() as (ratios, progress):
            found = guarded(search_workload, ready, plan, output, resume=resume, watch_ratios=ratios, watch=progress)
    except KeyboardInterrupt:
        fail("interrupted; the same command with --resume goes on where it stopped", code=130)
    done, pool = found.search, found.search.pool
    typer.echo(f"{done.iterations} of {len(pool)} candidates evaluated; {done.ended}")
    if done.best is None:
        fail(f"no profile keeps a quality of {min_quality}; {_nearest(done, found.profiles)}", code=1)
    for index in done.feasible[:5]:
        low, high = done.interval(index)
        interval = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
        typer.echo(f"{pool.ratios[index]:6.3f}x  {100 * done.quality(index):6.2f} %{interval}  {found.profiles[index]}")
    typer.echo(f"written: {output}, its library with {len(found.library.entries)} profiles")


def _nearest(done, profiles) -> str:
    tried = [step for step in done.steps if step.quality is not None]
    if not tried:
        return "every evaluation failed"
    best = max(tried, key=lambda step: step.quality)
    return f"the highest of those tried is {best.quality:.4f}, {profiles[best.index]}"


_LINES = 10.0  # seconds from one line to the next where no terminal keeps a line up to date


@contextmanager
def _live():
    """Two callbacks that keep one line on stderr up to date, or write some to a file: ratios measured, iterations."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    started: dict[str, tuple[float, int]] = {}

    def left(phase: str, done: int, most: int) -> str:
        now = time.monotonic()
        begun, before = started.setdefault(phase, (now, done))
        if done <= before:
            return "time left unknown"
        seconds = (now - begun) / (done - before) * (most - done)
        return f"at most {int(seconds // 60)}:{int(seconds % 60):02d} left"

    console, said = Console(stderr=True), -_LINES
    with Live(Text("loading"), console=console, refresh_per_second=4, transient=True) as live:

        def show(text: str) -> None:
            nonlocal said
            if console.is_terminal:
                live.update(Text(text))
            elif time.monotonic() - said >= _LINES:
                said = time.monotonic()
                console.print(text, highlight=False, soft_wrap=True)

        def ratios(done: int, total: int) -> None:
            show(f"ratios measured: {done} of {total}, {left('ratios', done, total)}")

        def progress(at) -> None:
            best = f"{at.best:.3f}" if at.best else "none yet"
            show(
                f"iteration {at.iteration} of {at.budget}, best feasible ratio {best}, {at.remaining} candidates "
                f"remain, {left('search', at.iteration, at.budget)}"
            )

        yield ratios, progress
