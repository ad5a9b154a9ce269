"""The main job: plan the notebooks of a profile, run them, judge their claims, write the gallery."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from diffkv_repro.core.paths import project_root
from diffkv_repro.study import runner
from diffkv_repro.study.claims import load_claims
from diffkv_repro.study.execute import Outcome
from diffkv_repro.study.gallery import write_gallery
from diffkv_repro.study.notebooks import (
    GPU_PROFILES,
    find_notebooks,
    parameters_for,
    parse_settings,
    profile_parameters,
)
from diffkv_repro.study.scoreboard import print_claims, print_failures, print_run
from diffkv_repro.study.session import output_folder
from diffkv_repro.study.verdicts import checked, judge_all, tally


@dataclass(frozen=True)
class Options:
    """Options of ``diffkv-repro reproduce``; None means the profile's default."""

    profile: str = "cpu"
    only: str | None = None
    output: Path | None = None
    resume: bool = False
    seed: int = 0
    settings: tuple[str, ...] = ()
    cell_timeout: int | None = None
    notebook_timeout: int | None = None


def reproduce_all(options: Options, console: Console) -> int:
    """Run everything ``options`` asks for; the exit status.

    0 when each notebook ended well, no claim failed and at least one was checked; else 1. Raises before
    anything runs for an unknown profile, notebook or parameter, or an output folder it cannot own.
    """
    root = project_root()
    per_notebook = profile_parameters(root, options.profile)
    figures = load_claims(root / "claims.yaml")
    notebooks = find_notebooks(root, options.only)
    extra = parse_settings(list(options.settings), notebooks)
    output = (options.output or output_folder(root, options.profile, changed=bool(extra))).absolute()
    _require_device(options.profile)
    steps = [
        runner.Step(
            notebook,
            parameters_for(
                notebook,
                profile=options.profile,
                given=per_notebook.get(notebook.name, {}),
                output=output,
                seed=options.seed,
                extra=extra,
            ),
            tuple(figure.id for figure in figures.values() if figure.notebook == notebook.name),
        )
        for notebook in notebooks
    ]
    with runner.locked(output), runner.stopping_on_signals():
        run = runner.Run(output, options.profile, runner.surroundings(), resume=options.resume)
        outcomes, resumed = _execute(run, steps, options, console)
        names = {step.notebook.name for step in steps}
        every = judge_all(figures.values(), output, root)
        judged = judge_all([f for f in figures.values() if f.notebook in names], output, root, run=run.id)
        page = write_gallery(output, figures.values(), every)
    print_claims(console, judged)
    print_run(console, outcomes, judged, resumed)
    print_failures(console, outcomes, output / "executed")
    console.print(f"figures: {page}", markup=False, highlight=False)
    return _status(outcomes, tally(judged)["fail"], checked(judged), console)


def _require_device(profile: str) -> None:
    if profile in GPU_PROFILES:
        import torch  # heavy, and only these profiles need to know

        if not torch.cuda.is_available():
            raise runner.RunRefused(f"profile {profile} needs an NVIDIA GPU, and torch finds none; use cpu or smoke")


def _execute(
    run: runner.Run, steps: list[runner.Step], options: Options, console: Console
) -> tuple[dict[str, Outcome], set[str]]:
    outcomes: dict[str, Outcome] = {}
    resumed: set[str] = set()
    limits = {
        "cell_timeout": options.cell_timeout or runner.CELL_TIMEOUT[options.profile],
        "notebook_timeout": options.notebook_timeout or runner.NOTEBOOK_TIMEOUT[options.profile],
    }
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        for step in steps:
            name = step.notebook.name
            earlier = run.finished(step)
            if earlier is not None:
                outcomes[name] = earlier
                resumed.add(name)
                console.print(f"{name}: done by the run that is resumed")
                continue
            bar = bars.add_task(name, total=None)
            if not console.is_terminal:
                console.print(f"{name}: started")
            outcomes[name] = run.execute(step, report=lambda p, bar=bar: _advance(bars, bar, p), **limits)
            bars.remove_task(bar)
            console.print(f"{name}: {outcomes[name].status} after {outcomes[name].seconds:.0f} s")
    return outcomes, resumed


def _advance(bars: Progress, bar: TaskID, progress: runner.Progress) -> None:
    description = f"{progress.step.notebook.name}  cell {min(progress.cells_done + 1, progress.cells)}/{progress.cells}"
    bars.update(bar, completed=progress.cells_done, total=progress.cells, description=description)


def _status(outcomes: dict[str, Outcome], failed: int, decided: int, console: Console) -> int:
    bad = [name for name, outcome in outcomes.items() if outcome.status != "ok"]
    problems = []
    if bad:
        problems.append(f"{len(bad)} of {len(outcomes)} notebooks did not end well: {', '.join(bad)}")
    if failed:
        problems.append(f"{failed} claims fail")
    if not decided:
        problems.append("nothing was checked")
    for problem in problems:
        console.print(problem, style="bold red", markup=False)
    return 1 if problems else 0
