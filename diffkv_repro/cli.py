"""The ``diffkv-repro`` command. Each sub-command parses its options and calls the library."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from diffkv_repro.cli_bench import bench
from diffkv_repro.cli_errors import fail, guarded
from diffkv_repro.cli_exhaustive import exhaustive
from diffkv_repro.cli_explore import explore
from diffkv_repro.cli_search import search
from diffkv_repro.cli_serve import serve

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    help="Every figure of DiffKV and KVServe, reproduced as checked claims.",
)  # fmt: skip
app.add_typer(bench, name="bench")
app.add_typer(serve, name="serve")
app.command()(search)
app.command()(exhaustive)
lm_eval = typer.Typer(no_args_is_help=True, help="lm-eval's own command line, with our models and tasks.")
app.add_typer(lm_eval, name="lm-eval")
app.command()(explore)

Output = Annotated[Path | None, typer.Option("--output", help="Folder of figures; by default that of the profile.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def reproduce(
    profile: Annotated[str, typer.Option(help="smoke, cpu, gpu or full.")] = "cpu",
    only: Annotated[str | None, typer.Option(help="Notebooks, as 01,02.")] = None,
    output: Output = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what the last run here finished.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
    setting: Annotated[list[str] | None, typer.Option("--set", help="name=value for notebooks that know it.")] = None,
    cell_timeout: Annotated[int | None, typer.Option(min=1, help="Seconds a cell may take.")] = None,
    notebook_timeout: Annotated[int | None, typer.Option(min=1, help="Seconds a notebook may take.")] = None,
) -> None:
    """Execute the notebooks, regenerate their figures, check their claims.

    Example: diffkv-repro reproduce --profile smoke --only 01,02
    """
    from diffkv_repro.study.reproduce import Options, reproduce_all
    from diffkv_repro.study.scoreboard import make_console

    options = Options(
        profile=profile, only=only, output=output, resume=resume, seed=seed, settings=tuple(setting or ()),
        cell_timeout=cell_timeout, notebook_timeout=notebook_timeout,
    )  # fmt: skip
    try:
        status = guarded(reproduce_all, options, make_console())
    except KeyboardInterrupt:
        fail("interrupted; the same command with --resume goes on where it stopped", code=130)
    raise typer.Exit(status)


@app.command()
def check(
    figure: Annotated[str | None, typer.Option(help="One figure or table, as diffkv-fig02.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Judge every claim by the measurements on disk; exit 1 when one fails or none was checked.

    Example: diffkv-repro check --figure diffkv-fig08
    """
    from diffkv_repro.study.scoreboard import make_console, print_claims
    from diffkv_repro.study.verdicts import checked, tally

    _, judged, _ = guarded(_judged, output, figure)
    if as_json:
        typer.echo(json.dumps([judgement.as_dict() for judgement in judged], indent=1))
    else:
        print_claims(make_console(), judged)
    if not checked(judged):
        fail("nothing was checked", code=1)
    raise typer.Exit(1 if tally(judged)["fail"] else 0)


@app.command()
def figures(
    output: Output = None,
    as_json: Json = False,
    gallery: Annotated[bool, typer.Option("--gallery", help="Also rewrite index.html there.")] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Also draw all of them anew from their records: new look, same numbers.")
    ] = False,
) -> None:
    """List every figure and table with its notebook, its files and its verdicts.

    Example: diffkv-repro figures --gallery
    """
    from diffkv_repro.study.gallery import write_gallery
    from diffkv_repro.study.pages import redraw as draw
    from diffkv_repro.study.runner import locked
    from diffkv_repro.study.scoreboard import figure_rows, make_console, print_figures

    entries, judged, folder = guarded(_judged, output, None)
    rows = figure_rows(entries, judged, folder)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_figures(make_console(), rows)
    if gallery or redraw:

        def rewrite() -> None:
            with locked(folder):
                if redraw:
                    for entry in entries:
                        draw(folder, entry.id)
                if gallery:
                    write_gallery(folder, entries, judged)

        guarded(rewrite)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Bundled name, folder, .gguf file or hub id.")]) -> None:
    """Get a model ready: download or convert its weights if they are not in the cache yet.

    Example: diffkv-repro fetch smollm2-135m
    """
    from diffkv_repro.models import load_model

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    loaded = guarded(load_model, name)
    typer.echo(f"{loaded.name}: {loaded.layout}; {loaded.precision}; {loaded.fingerprint}")


@app.command()
def doctor() -> None:
    """Say what this machine can run, and how to enable the rest.

    Example: diffkv-repro doctor
    """
    from diffkv_repro.doctor import examine, print_findings
    from diffkv_repro.study.scoreboard import make_console

    findings = guarded(examine)
    print_findings(make_console(), findings)
    raise typer.Exit(1 if any(finding.required and not finding.good for finding in findings) else 0)


@lm_eval.command(
    "run", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def lm_eval_run(context: typer.Context) -> None:
    """Evaluate a model: all options of `lm-eval run`, and --model diffkv, fp16, uniform, kvserve, kivi, ...

    Example: diffkv-repro lm-eval run --model diffkv --model_args pretrained=smollm2-135m,policy=K8V4-K4V2
    --include_path tasks --tasks diffkv_local
    """
    from diffkv_repro.evaluation.lm_eval_command import run_lm_eval

    guarded(run_lm_eval, context.args)


@lm_eval.command("tasks")
def lm_eval_tasks(
    folder: Annotated[Path, typer.Argument(help="Where to write the task files.")],
    documents: Annotated[int, typer.Option(min=1, help="Documents of each task.")] = 100,
    pairs: Annotated[int, typer.Option(help="Words and numbers in a list to recall from.")] = 20,
    words: Annotated[int, typer.Option(help="Words of filler around a pass key.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
) -> None:
    """Write small tasks that need no network: recall, multiple choice, pass key.

    Example: diffkv-repro lm-eval tasks tasks --documents 20
    """
    from diffkv_repro.workloads.lm_eval_tasks import TAG, write_lm_eval_tasks

    names = guarded(write_lm_eval_tasks, folder, documents=documents, pairs=pairs, words=words, seed=seed)
    typer.echo(f"{', '.join(names)}: run them with --include_path {folder} --tasks {TAG}")


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(help="Policy file to write, as policy.json.")],
    model: Annotated[str, typer.Option(help="Bundled name, folder, .gguf file or hub id.")] = "smollm2-135m",
    texts: Annotated[str, typer.Option(help="prose, code, dialogue, wikitext, a folder, or hub:...")] = "prose",
    tiers: Annotated[str, typer.Option(help="High and low precision.")] = "K8V4-K4V2",
    tolerance: Annotated[float, typer.Option(min=0, help="Nats a token that may be lost.")] = 0.05,
    count: Annotated[int, typer.Option("--texts-count", min=1, help="Texts to calibrate on.")] = 12,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a text; the last 128 at most are decoded.")] = 640,
    bias_free: Annotated[bool, typer.Option("--bias-free", help="Take out the bias of the keys.")] = False,
    task: Annotated[
        str | None, typer.Option(help="A task to keep too: recall, uuid_recall, passkey, arithmetic, copy.")
    ] = None,
    max_drop: Annotated[float, typer.Option(min=0, max=1, help="Accuracy on the task that may be lost.")] = 0.02,
    items: Annotated[int, typer.Option(min=1, help="Items of the task.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the choice of texts and items.")] = 0,
) -> None:
    """Sweep alpha_high, then alpha_low, and write the policy chosen; what was measured already is not run again.

    With --task, alpha_high 0 is tried as well: everything in the high precision. The rule, and what every setting
    lost, are written beside the policy, as policy.calibration.json.

    Example: diffkv-repro calibrate policy.json --texts prose --tolerance 0.05
    """
    from diffkv_repro.core.paths import cache_dir
    from diffkv_repro.diffkv import CompressionPolicy
    from diffkv_repro.evaluation.calibration import ALPHA_HIGH, TaskRule
    from diffkv_repro.evaluation.calibration import calibrate as sweep
    from diffkv_repro.models import load_model
    from diffkv_repro.workloads import load_windows
    from diffkv_repro.workloads.tasks import make_items

    folder = cache_dir() / "calibration"
    asked = guarded(make_items, task, items, seed=seed) if task else []
    rule = TaskRule(asked, max_drop, folder / "tasks.sqlite") if task else None
    base = guarded(CompressionPolicy.paper, tiers, prompt_divisor="length", group_max="each-step", bias_free=bias_free)
    loaded = guarded(load_model, model)
    windows = guarded(load_windows, [texts], loaded.tokenizer, count=count, tokens=tokens, seed=seed)
    found = guarded(
        sweep, loaded, windows, folder, base=base, tolerance=tolerance, task=rule,
        prompt_tokens=tokens - min(128, tokens // 2), alpha_high=(0.0, *ALPHA_HIGH) if task else ALPHA_HIGH,
    )  # fmt: skip
    typer.echo(found.summary())
    beside = guarded(found.save, output)
    typer.echo(f"written: {output}, and its rule: {beside}")


def _judged(output: Path | None, figure: str | None):
    from diffkv_repro.core.paths import project_root
    from diffkv_repro.study.claims import load_claims
    from diffkv_repro.study.verdicts import judge_all

    root = project_root()
    entries = load_claims(root / "claims.yaml")
    if figure is not None and figure not in entries:
        raise ValueError(f"unknown figure {figure!r}; there are {', '.join(entries)}")
    chosen = [entry for name, entry in entries.items() if figure in (None, name)]
    folder = output or root / "figures"
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    return chosen, judge_all(chosen, folder, root), folder


if __name__ == "__main__":
    app()
