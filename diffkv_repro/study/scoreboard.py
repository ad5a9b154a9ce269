"""Tables for people: how the notebooks went, and what holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffkv_repro.study.claims import Figure
from diffkv_repro.study.execute import Outcome
from diffkv_repro.study.verdicts import VERDICTS, Judgement, expected_text, number_text, tally

_WIDTH_WITHOUT_TERMINAL = 120
_STYLE = {"pass": "green", "refuted": "yellow", "fail": "bold red", "not run": "dim"}


def make_console() -> Console:
    """A console as wide as its terminal, or wide enough for the tables where it is a file."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def print_run(console: Console, outcomes: dict[str, Outcome], judged: Sequence[Judgement], resumed: set[str]) -> None:
    """One row a notebook: how it ended, seconds, peak memory, claims by verdict."""
    table = Table(title="Notebooks", title_justify="left")
    table.add_column("notebook", no_wrap=True)
    table.add_column("result")
    for title in ("seconds", "peak GiB", *VERDICTS):
        table.add_column(title, justify="right")
    for name, outcome in outcomes.items():
        counts = tally(j for j in judged if j.claim.notebook == name)
        result = outcome.status + (" (earlier)" if name in resumed else "")
        colour = "green" if outcome.status == "ok" else "bold red"
        cells = [f"[{_STYLE[v]}]{counts[v]}[/]" if counts[v] else "0" for v in VERDICTS]
        table.add_row(name, f"[{colour}]{result}[/]", f"{outcome.seconds:.0f}", f"{outcome.peak_gib:.2f}", *cells)
    console.print(table)


def print_failures(console: Console, outcomes: dict[str, Outcome], executed: Path) -> None:
    """Quote the failing cell of each notebook that did not end well."""
    for name, outcome in outcomes.items():
        if outcome.status == "ok":
            continue
        where = f", cell {outcome.cell_number}" if outcome.cell_number is not None else ""
        console.print(f"\n[bold red]{name}: {outcome.status}{where}[/]")
        if outcome.cell:
            quoted = "\n".join(f"    | {line}" for line in outcome.cell.splitlines())
            console.print(quoted, markup=False, highlight=False, soft_wrap=True)
        for line in (outcome.error, f"what it did until then: {executed / f'{name}.ipynb'}"):
            console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)


def print_claims(console: Console, judged: Sequence[Judgement]) -> None:
    """One row a claim that was measured, the verdicts' sums, and why the rest was not."""
    table = Table(title="Claims", title_justify="left", box=box.HORIZONTALS, show_lines=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim", overflow="fold", ratio=3)
    table.add_column("measured, expected", overflow="fold", ratio=1)
    shown = [j for j in judged if j.measured is not None]
    for judgement in shown:
        claim = judgement.claim
        text = f"[bold]{claim.id}[/]\n{escape(claim.statement)}"
        if judgement.verdict != "pass":
            text += f"\n[italic]{escape(judgement.reason)}[/]"
        table.add_row(
            f"[{_STYLE[judgement.verdict]}]{judgement.verdict}[/]",
            text,
            f"{number_text(judgement.measured)} {claim.unit}\n"
            f"[dim]{expected_text(claim.expectation) or 'not judged'}[/]",
        )
    if shown:
        console.print(table)
    counts = tally(judged)
    console.print(", ".join(f"[{_STYLE[v]}]{counts[v]} {v}[/]" for v in VERDICTS))
    reasons: dict[str, int] = {}
    for judgement in judged:
        if judgement.measured is None:
            reasons[judgement.reason] = reasons.get(judgement.reason, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        console.print(f"  not run, {count}: {reason}", style="dim", markup=False, highlight=False)


def figure_rows(figures: Sequence[Figure], judged: Sequence[Judgement], folder: Path) -> list[dict[str, Any]]:
    """One plain object a figure: ``id``, ``paper``, ``title``, ``notebook``, ``files`` and its verdicts."""
    rows = []
    for figure in figures:
        counts = tally(judgement for judgement in judged if judgement.claim.figure == figure.id)
        files = [f"{figure.id}{ending}" for ending in (".html", ".json", ".png")]
        rows.append(
            {
                "id": figure.id,
                "paper": figure.paper,
                "title": figure.title,
                "notebook": figure.notebook,
                "files": [name for name in files if (folder / name).is_file()],
                "verdicts": {verdict: counts[verdict] for verdict in VERDICTS},
            }
        )
    return rows


def print_figures(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """The same as a table."""
    table = Table()
    for title in ("figure", "what it shows", "notebook", "files"):
        table.add_column(title, overflow="fold")
    for verdict in VERDICTS:
        table.add_column(verdict, justify="right")
    for row in rows:
        kinds = " ".join(name.rsplit(".", 1)[1] for name in row["files"])
        counts = [str(row["verdicts"][verdict] or "") for verdict in VERDICTS]
        table.add_row(row["id"], escape(row["title"]), row["notebook"], kinds, *counts)
    console.print(table)
