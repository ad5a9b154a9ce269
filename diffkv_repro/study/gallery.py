"""``index.html``: every figure with its claims, verdicts and provenance, on one static page."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffkv_repro.core.files import write_text
from diffkv_repro.study.claims import Figure
from diffkv_repro.study.records import record_path
from diffkv_repro.study.verdicts import VERDICTS, Judgement, expected_text, number_text, tally

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>DiffKV and KVServe, reproduced</title>
<style>
body {{ font: 16px/1.5 Helvetica, Arial, sans-serif; color: #222; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.7rem; }} h2 {{ font-size: 1.25rem; margin-top: 2.5rem; }}
img, iframe {{ width: 100%; border: 1px solid #ddd; }} iframe {{ height: 560px; }}
table {{ border-collapse: collapse; width: 100%; margin: .8rem 0; font-size: .92rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #ddd; }}
.scroll {{ overflow-x: auto; }} .foot {{ color: #595959; font-size: .85rem; }}
.pass {{ color: #00664b; }} .refuted {{ color: #8a5300; }} .fail {{ color: #b00020; font-weight: bold; }}
.not-run {{ color: #595959; }} blockquote {{ margin: .6rem 0; padding-left: .9rem; border-left: 3px solid #0072B2; }}
</style>
</head>
<body>
<h1>DiffKV and KVServe, reproduced</h1>
<p>{summary}</p>
<p>Each figure below was drawn by a notebook, and each of its statements is a claim that was checked:
<span class="pass">pass</span>; <span class="refuted">refuted</span> (measured properly, and the paper's statement
does not hold: the correction beside it does); <span class="fail">fail</span> (neither holds);
<span class="not-run">not run</span>.</p>
{figures}
<h2>Not drawn yet</h2>
<div class="scroll"><table><tr><th>figure</th><th>what it shows</th><th>notebook</th><th>claims</th></tr>
{missing}
</table></div>
</body>
</html>
"""


def write_gallery(folder: Path, figures: Iterable[Figure], judged: Sequence[Judgement]) -> Path:
    """Write ``index.html`` beside the figures in ``folder``; it works from ``file://``."""
    drawn, missing = [], []
    for figure in figures:
        own = [judgement for judgement in judged if judgement.claim.figure == figure.id]
        if not record_path(folder, figure.id).is_file():
            cells = (figure.id, figure.title, figure.notebook, str(len(own)))
            missing.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        else:
            drawn.append(_section(folder, figure, own))
    counts = tally(judged)
    summary = f"{len(judged)} claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) + "."
    page = _PAGE.format(summary=summary, figures="\n".join(drawn), missing="\n".join(missing))
    return write_text(Path(folder) / "index.html", page)


def _section(folder: Path, figure: Figure, judged: Sequence[Judgement]) -> str:
    parts = [
        f'<h2 id="{figure.id}">{html.escape(figure.title)} <small class="foot">{figure.id}</small></h2>',
        f"<blockquote>{html.escape(figure.paper_says)}</blockquote>",
    ]
    page, picture = f"{figure.id}.html", f"{figure.id}.png"
    if (folder / picture).is_file():
        alt = html.escape(figure.title)
        parts.append(f'<a href="{page}"><img src="{picture}" alt="{alt}" loading="lazy"></a>')
        parts.append(f'<p class="foot"><a href="{page}">interactive</a></p>')
    elif (folder / page).is_file():
        parts.append(f'<iframe src="{page}" title="{html.escape(figure.title)}" loading="lazy"></iframe>')
    rows = "".join(_row(judgement) for judgement in judged)
    head = "".join(f"<th>{title}</th>" for title in ("verdict", "statement", "paper", "expected", "here"))
    parts.append(f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>')
    found = next((j.provenance for j in judged if j.provenance), None)
    if found:
        where = (found["device"], found["date"], f"commit {found['commit']}", f"profile {found['profile']}")
        parts.append(f'<p class="foot">{html.escape(" · ".join(where))} · {figure.notebook}</p>')
    return "\n".join(parts)


def _row(judgement: Judgement) -> str:
    claim = judgement.claim
    statement = html.escape(claim.statement)
    if judgement.reason and judgement.verdict != "pass":
        statement += f'<br><span class="foot">{html.escape(judgement.reason)}</span>'
    cells = (
        "" if claim.published is None else number_text(claim.published),
        expected_text(claim.expectation, claim.unit) or "not judged",
        "" if judgement.measured is None else f"{number_text(judgement.measured)} {claim.unit}",
    )
    shown = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
    style = judgement.verdict.replace(" ", "-")
    return f'<tr><td class="{style}">{judgement.verdict}</td><td>{statement}</td>{shown}</tr>'
