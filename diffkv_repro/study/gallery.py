"""``index.html``: every figure with its claims, verdicts and provenance, on one static page to search and filter."""

import html
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffkv_repro.core.files import write_text
from diffkv_repro.core.paths import project_root
from diffkv_repro.study.claims import Figure
from diffkv_repro.study.gallery_page import MARKS, PAGE, SCRIPT, STYLE
from diffkv_repro.study.records import RecordError, read_record, record_path
from diffkv_repro.study.verdicts import VERDICTS, Judgement, expected_text, number_text, tally

_MEANS = {
    "pass": "the statement holds here",
    "refuted": "measured properly, and the paper's statement does not hold: our correction does",
    "fail": "neither holds",
    "not run": "needs what this run lacked, or is only reported",
}
_COLUMNS = ("verdict", "statement", "paper", "expected", "here")


def write_gallery(folder: Path, figures: Iterable[Figure], judged: Sequence[Judgement]) -> Path:
    """Write ``index.html`` beside the figures in ``folder``; it works from ``file://`` and asks no network."""
    drawn, missing, papers = [], [], []
    notebooks = os.path.relpath(project_root() / "notebooks", Path(folder).resolve())
    for figure in figures:
        own = [judgement for judgement in judged if judgement.claim.figure == figure.id]
        papers.append(figure.paper)
        if not record_path(folder, figure.id).is_file():
            cells = (figure.id, figure.title, figure.notebook, str(len(own)))
            missing.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        else:
            drawn.append(_card(Path(folder), figure, own, notebooks))
    counts = tally(judged)
    page = PAGE.format(
        style=STYLE,
        script=SCRIPT,
        summary=f"{len(judged)} claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) + ".",
        verdicts="; ".join(f"{_badge(name)} {html.escape(_MEANS[name])}" for name in VERDICTS),
        papers="".join(f"<option>{html.escape(paper)}</option>" for paper in dict.fromkeys(papers)),
        choices="".join(f'<option value="{_style(name)}">{name}</option>' for name in VERDICTS),
        figures="\n".join(drawn),
        missing="\n".join(missing),
    )
    return write_text(Path(folder) / "index.html", page)


def _card(folder: Path, figure: Figure, judged: Sequence[Judgement], notebooks: str) -> str:
    """One figure: thumbnail, title and verdicts, what the paper says, the figure itself and its claims to open."""
    verdicts = Counter(judgement.verdict for judgement in judged)
    words = [figure.id, figure.paper, figure.title, figure.paper_says, figure.notebook, _number(figure.id)]
    words += [judgement.claim.statement for judgement in judged]
    title = html.escape(figure.title)
    badges = " ".join(_badge(name, verdicts[name]) for name in VERDICTS if verdicts[name])
    link = f'<a href="{html.escape(notebooks)}/{figure.notebook}.ipynb">notebook {figure.notebook}</a>'
    parts = [
        f'<article id="{figure.id}" data-paper="{html.escape(figure.paper)}" '
        f'data-verdicts="{" ".join(_style(name) for name in verdicts)}" '
        f'data-text="{html.escape(" ".join(words).lower())}" aria-labelledby="{figure.id}-title">',
        f"<div>{_thumbnail(folder, figure)}</div>",
        f'<div><h2 id="{figure.id}-title">{title}</h2>',
        f'<p class="soft">{html.escape(figure.paper)} · {_number(figure.id)} · {link}</p><p>{badges}</p>',
        f"<blockquote>{html.escape(figure.paper_says)}</blockquote></div>",
    ]
    if (folder / f"{figure.id}.html").is_file():
        frame = (
            f'<iframe data-src="{figure.id}.html" title="{title}" height="{_height(folder, figure)}"></iframe>'
            f'<p class="soft"><a href="{figure.id}.html">on a page of its own</a></p>'
        )
        parts.append(
            f'<details class="wide" id="{figure.id}-live"><summary>Interactive figure</summary>'
            f'<div class="scroll">{frame}</div></details>'
        )
    rows = "".join(_row(judgement) for judgement in judged)
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    parts.append(
        f'<details class="wide statements"><summary>Claims: {len(judged)}</summary>'
        f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details>'
    )
    found = dict.fromkeys(_origin(judgement.provenance) for judgement in judged if judgement.provenance)
    parts += [f'<p class="soft wide">measured: {html.escape(origin)}</p>' for origin in found]
    return "\n".join([*parts, "</article>"])


def _thumbnail(folder: Path, figure: Figure) -> str:
    picture = f"{figure.id}.png"
    if not (folder / picture).is_file():
        return '<p class="noimage soft">Numbers only: see the claims.</p>' if not _is_drawn(folder, figure) else ""
    opens = f' data-opens="{figure.id}-live"' if _is_drawn(folder, figure) else ""
    target = f"{figure.id}.html" if opens else picture
    alt = f"{figure.title}: open the interactive figure"
    return f'<a href="{target}"{opens}><img src="{picture}" alt="{html.escape(alt)}" loading="lazy"></a>'


def _is_drawn(folder: Path, figure: Figure) -> bool:
    return (folder / f"{figure.id}.html").is_file()


def _height(folder: Path, figure: Figure) -> int:
    """Of the frame: that of the figure, and a little; a damaged record has no height of its own."""
    try:
        layout = read_record(folder, figure.id).plot.get("layout", {})
    except RecordError:
        layout = {}
    return int(layout.get("height") or 540) + 44


def _row(judgement: Judgement) -> str:
    claim = judgement.claim
    statement = html.escape(claim.statement)
    if judgement.reason and judgement.verdict != "pass":
        statement += f'<br><span class="soft">{html.escape(judgement.reason)}</span>'
    cells = {
        "paper": "" if claim.published is None else number_text(claim.published),
        "expected": expected_text(claim.expectation, claim.unit) or "not judged",
        "here": "" if judgement.measured is None else f"{number_text(judgement.measured)} {claim.unit}",
    }
    shown = "".join(f'<td data-name="{name}">{html.escape(str(cell))}</td>' for name, cell in cells.items())
    return f'<tr id="{claim.id}"><td>{_badge(judgement.verdict)}</td><td>{statement}</td>{shown}</tr>'


def _badge(verdict: str, count: int = 0) -> str:
    number = f"{count} " if count else ""
    mark = f'<span aria-hidden="true">{MARKS[verdict]}</span>'
    return f'<span class="badge {_style(verdict)}">{mark} {number}{verdict}</span>'


def _style(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _number(figure: str) -> str:
    """``diffkv-fig08`` -> Figure 8, ``diffkv-tab1`` -> Table 1, ``kvserve-thm61`` -> Theorem 6.1; else the id."""
    name = figure.partition("-")[2]
    for short, long in (("fig", "Figure"), ("tab", "Table")):
        if name.startswith(short):
            return f"{long} {name.removeprefix(short).lstrip('0').replace('-', ', ')}"
    if name.startswith("thm"):
        return f"Theorem {name[3:-1]}.{name[-1]}"
    return figure


def _origin(provenance) -> str:
    where = (provenance["device"], provenance["date"], f"commit {provenance['commit']}")
    return " · ".join((*where, f"profile {provenance['profile']}"))
