"""A figure's files, written together: its record, its page, its picture; and drawn anew from the record alone."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go

from diffkv_repro.core.files import atomic_path
from diffkv_repro.study import drawing
from diffkv_repro.study.records import Record, read_record, record_text


def write_figure(folder: Path, record: Record, plot: go.Figure | None) -> None:
    """Write JSON record, HTML and PNG of ``plot``, all of them or none; the record's own ``plot`` is replaced.

    Raises WriteError where the disk refuses.
    """
    folder, pages = Path(folder), {}
    data = {}
    if plot is not None:
        data = drawing.as_data(plot)
        drawing.ensure_script(folder)
        pages[".html"] = drawing.html_page(record.figure, plot)
        picture = drawing.png_image(record.figure, plot)
        if picture is not None:
            pages[".png"] = picture
    # The record, opened first, is renamed last, so it never stands beside an older page.
    contents = {".json": record_text(replace(record, plot=data)).encode(), **pages}
    with ExitStack() as files:
        for ending, content in contents.items():
            files.enter_context(atomic_path(folder / f"{record.figure}{ending}")).write_bytes(content)
    if ".png" not in contents:  # one of an earlier run would not show this run's numbers
        (folder / f"{record.figure}.png").unlink(missing_ok=True)


def redraw(folder: Path, figure: str) -> bool:
    """Draw ``figure`` anew in the look that figures have now, from its record: the same numbers, provenance and foot.

    False where ``folder`` has no record of it, or one without a plot. What a plotting function would draw otherwise
    now, a title or an axis, stays as it was: that takes its notebook.
    """
    record = read_record(folder, figure)
    if record is None or not record.plot:
        return False
    write_figure(folder, record, drawing.restyle(record.as_figure()))
    return True
