"""``Explorer``: controls, a figure that follows them, and the lines that make the same figure in a script."""

import html
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

State = Mapping[str, Any]
_MENDABLE = (ValueError, OSError)  # a wrong name, a text too short: said in one line; anything else with its traceback
_CODE = (
    '<pre style="user-select: all; margin: 0; padding: 8px; background: #F5F5F5; white-space: pre-wrap">{}</pre>'
    "<span>One click selects all of it.</span>"
)
_ERROR = '<pre role="alert" style="color: #B00020; border-left: 4px solid #B00020; padding: 8px">{}</pre>'


@dataclass(frozen=True)
class View:
    """What is to be seen in one state: a figure, and tables or text below it as HTML."""

    figure: go.Figure
    html: str = ""


@dataclass(frozen=True)
class Action:
    """A button: ``run`` takes the state and returns HTML, which is shown until a control moves."""

    label: str
    run: Callable[[State], str]


class Explorer(ipywidgets.VBox):
    """``show(state)`` is a plain function; this layer only asks for the state and puts up what comes back.

    ``controls`` by name; ``state`` their values. ``settle(controls)`` runs before every drawing, to bring controls in
    line that depend on others. ``code(state)`` gives lines of Python that leave the same figure in ``figure``;
    ``write(state, path)`` writes a file of the state, whose usual name is ``file``.

    What goes wrong stands in red in place of the figure, so that no figure of an older state can be mistaken for that
    of the new one; whatever is not the user's to mend is raised besides. There is no ``Output`` widget: those swallow
    what a callback raises, and nbclient waits for them in vain.
    """

    def __init__(
        self, controls: Mapping[str, ipywidgets.Widget], show: Callable[[State], View], *,
        code: Callable[[State], str], write: Callable[[State, Path], None] | None = None, file: str = "",
        settle: Callable[[Mapping[str, ipywidgets.Widget]], None] | None = None, actions: Sequence[Action] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.controls = dict(controls)
        self._show, self._code, self._write, self._settle = show, code, write, settle
        self._settling = False
        self.error: Exception | None = None
        self.figure: go.FigureWidget | None = None
        self.said = ipywidgets.HTML()
        self.below = ipywidgets.HTML()
        self.code = ipywidgets.HTML()
        self.buttons = {action.label: self._button(action) for action in actions}
        self.path = ipywidgets.Text(value=file, description="file")
        save = ipywidgets.Button(description="write file")
        save.on_click(self._save)
        self.saved = ipywidgets.HTML()
        wide = [one for one in self.controls.values() if isinstance(one, ipywidgets.Textarea)]
        narrow = [one for one in self.controls.values() if one not in wide]
        self._asked = ipywidgets.VBox(
            [
                *wide,
                ipywidgets.HBox(narrow, layout={"flex_flow": "row wrap"}),
                ipywidgets.HBox([*self.buttons.values()]),
            ]
        )
        files = [ipywidgets.HBox([self.path, save]), self.saved] if write else []
        self._copy = ipywidgets.Accordion([ipywidgets.VBox([self.code, *files])], titles=("Copy as code",))
        for one in self.controls.values():
            one.observe(self._follow, names="value")
        self._follow()

    @property
    def state(self) -> dict[str, Any]:
        """The values of all controls."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def source(self) -> str:
        """The lines that recreate the figure."""
        return self._code(self.state)

    def _follow(self, _: object = None) -> None:
        if self._settling:
            return
        self._settling = True
        try:
            self._guarded(self._draw)
        finally:
            self._settling = False

    def _draw(self) -> None:
        if self._settle is not None:
            self._settle(self.controls)
        view = self._show(self.state)
        before, self.figure = self.figure, go.FigureWidget(view.figure)
        self.below.value, self.code.value = view.html, _CODE.format(html.escape(self.source))
        self.children = (self._asked, self.said, self.figure, self.below, self._copy)
        if before is not None:
            before.close()

    def _button(self, action: Action) -> ipywidgets.Button:
        button = ipywidgets.Button(description=action.label, layout={"width": "auto"})

        def pressed(_: object) -> None:
            def run() -> None:
                button.disabled = True
                try:
                    self.said.value = action.run(self.state)
                finally:
                    button.disabled = False

            self._guarded(run)

        button.on_click(pressed)
        return button

    def _save(self, _: object) -> None:
        def run() -> None:
            path = Path(self.path.value).expanduser()
            self._write(self.state, path)
            self.saved.value = f"written: {html.escape(str(path))}"

        self.saved.value = ""
        self._guarded(run)

    def _guarded(self, run: Callable[[], None]) -> None:
        self.error, self.said.value = None, ""
        try:
            run()
        except Exception as error:
            self.error = error
            mendable = isinstance(error, _MENDABLE)
            text = str(error) if mendable else "".join(traceback.format_exception(error))
            self.said.value = _ERROR.format(html.escape(text))
            self.below.value = self.code.value = ""
            self.children = (self._asked, self.said)
            if not mendable:
                raise


def as_html(table: pd.DataFrame, caption: str = "") -> str:
    """A table as HTML, its texts escaped; a column of numbers to the right."""
    head = f"<caption style='text-align: left'>{html.escape(caption)}</caption>" if caption else ""
    return table.to_html(border=0, na_rep="").replace("<thead>", f"{head}<thead>", 1)
