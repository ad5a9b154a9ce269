"""``Study``: what a notebook needs to measure, draw, record and check, in as few lines as possible."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from pandas.io.formats.style import Styler

from diffkv_repro.core.paths import project_root
from diffkv_repro.core.provenance import capture
from diffkv_repro.study import drawing
from diffkv_repro.study.claims import Figure, load_claims
from diffkv_repro.study.notebooks import GPU_PROFILES
from diffkv_repro.study.pages import write_figure
from diffkv_repro.study.records import Measurement, Record, read_record
from diffkv_repro.study.verdicts import expected_text, judge_all, number_text, tally


class ClaimFailed(AssertionError):
    """At least one claim of a notebook neither holds nor has a correction that does."""


class Study:
    """One notebook's run: where its figures go, what its numbers depend on, which claims it answers.

    ``output`` is relative to the project's root unless absolute. ``config`` is stored with every number; a
    notebook adds to it what it learns on the way (fingerprints of weights and texts).
    """

    def __init__(self, notebook: str, *, profile: str, output: str, seed: int, **config: Any) -> None:
        self.root = project_root()
        self.notebook = notebook
        self.profile = profile
        self.seed = seed
        self.config = config
        self.folder = self.root / output
        figures = load_claims(self.root / "claims.yaml")
        self.figures: dict[str, Figure] = {
            name: figure for name, figure in figures.items() if figure.notebook == notebook
        }
        if not self.figures:
            raise ValueError(f"claims.yaml has no figure of notebook {notebook!r}")

    @property
    def device(self) -> str:
        """Where models of this profile run: profiles gpu and full on CUDA, the others on the CPU."""
        return "cuda" if self.profile in GPU_PROFILES else "cpu"

    def cache_folder(self, name: str) -> Path:
        """Where measurements that notebooks share are kept between runs; not committed."""
        return self.root / "results" / "cache" / name

    def record(self, figure: str) -> Record | None:
        """What this run's output folder holds on ``figure``."""
        return read_record(self.folder, figure)

    def recorded(self, figure: str) -> dict[str, Record]:
        """Measurements of ``figure`` that were made once elsewhere, by the folder in ``figures/recorded/``."""
        folders = sorted(path for path in (self.root / "figures" / "recorded").glob("*") if path.is_dir())
        found = {folder.name: read_record(folder, figure) for folder in folders}
        return {name: record for name, record in found.items() if record is not None}

    def publish(
        self, figure: str, plot: go.Figure | None, measured: Mapping[str, Measurement], *, basis: str = ""
    ) -> go.Figure | None:
        """Write ``figure``'s files (JSON record, HTML, PNG) and return the finished plot to show.

        ``basis`` says on the figure's face what was measured (model, texts). Raises ValueError for a figure
        of another notebook or a metric that no claim asks for, WriteError where the disk refuses.
        """
        entry = self._known(figure)
        unused = sorted(set(measured) - {claim.metric for claim in entry.claims})
        if unused:
            raise ValueError(f"no claim of {figure} asks for {', '.join(unused)}")
        provenance = capture(root=self.root, seed=self.seed, profile=self.profile, config=self.config)
        if plot is not None:
            drawing.finish(plot, "<br>".join(filter(None, (basis, provenance.summary()))))
        write_figure(self.folder, Record(figure, provenance.as_dict(), dict(measured)), plot)
        return plot

    def check(self) -> Styler:
        """The verdict on every claim of this notebook as a table; raises ClaimFailed if one fails."""
        judged = judge_all(self.figures.values(), self.folder, self.root, run=os.environ.get("DIFFKV_REPRO_RUN"))
        failed = [judgement for judgement in judged if judgement.verdict == "fail"]
        if failed:
            raise ClaimFailed("\n".join(f"{j.claim.id}: {j.claim.statement} {j.reason}" for j in failed))
        if not any(j.measured is not None for j in judged):
            raise ClaimFailed(f"notebook {self.notebook} measured nothing that a claim asks for")
        rows = [
            {
                "claim": j.claim.id,
                "statement": j.claim.statement,
                "paper": "" if j.claim.published is None else number_text(j.claim.published),
                "here": "" if j.measured is None else f"{number_text(j.measured)} {j.claim.unit}".strip(),
                "expected": expected_text(j.claim.expectation, j.claim.unit) or "not judged",
                "verdict": j.verdict,
            }
            for j in judged
        ]
        summary = ", ".join(f"{count} {verdict}" for verdict, count in tally(judged).items())
        with pd.option_context("display.max_colwidth", None):
            table = pd.DataFrame(rows).set_index("claim").style.set_caption(summary)
            left = [("text-align", "left"), ("vertical-align", "top")]
            return table.set_table_styles([{"selector": "th, td, caption", "props": left}])

    def _known(self, figure: str) -> Figure:
        if figure not in self.figures:
            raise ValueError(f"{figure} is not of notebook {self.notebook}; it has {', '.join(self.figures)}")
        return self.figures[figure]


def output_folder(root: Path, profile: str, *, changed: bool = False) -> Path:
    """Where a run of ``profile`` writes by default.

    Only the committed ``cpu`` figures live in ``figures/``; a run with ``changed`` parameters is not one of them.
    """
    if changed:
        return root / "results" / "custom"
    return root / "figures" if profile == "cpu" else root / "results" / profile
