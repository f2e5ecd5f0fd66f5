"""A run watched while it goes on: ipywidgets around the panels of `rlkit.live`. Nothing here decides what is shown.

The widgets change in place, from a thread, so that the notebook stays free for other cells. What is saved with the
notebook, and all that a headless run shows, is the last state as plain HTML.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from rlkit.errors import BadInput, RlkitError
from rlkit.live import FIGURES, Look, changed, page, panels
from rlkit.live_source import FolderSource, ProjectSource, Source
from rlkit.run_folder import RunFolder
from rlkit.sketch import STYLE

# Seconds between two looks: a step of the local run takes about two, and reading, judging and drawing it 0.2 s of CPU.
EVERY_S = 2.0


def live(folder: str = "", project: str = "", run: str = "", source: str = "") -> LiveView:
    """A run watched, by its folder, else by trackio project and run (empty: the newest). Raises BadInput."""
    if folder:
        return LiveView(FolderSource(RunFolder(Path(folder))))
    if not project:
        raise BadInput("folder and project are both empty: name a run's folder, or a trackio project")
    return LiveView(ProjectSource(project, run or None, source or None))


class LiveView(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """Verdict, progress, eight figures, a button that stops the run and a field that limits what is in flight."""

    def __init__(self, source: Source, every_s: float = EVERY_S) -> None:
        self._source, self._every_s = source, every_s
        self._shown: dict[str, str] = {}
        self.last: Look | None = None
        self._thread: threading.Thread | None = None
        self._on_over: Callable[[], None] | None = None
        self._panel = {name: widgets.HTML() for name in ("verdict", "progress", *FIGURES)}
        self._stop = _button("Stop the run", "Stops the jobs; the same folder can be resumed", self._on_stop)
        self._most = widgets.BoundedIntText(
            value=1, min=1, max=1, description="At most in flight", style={"description_width": "initial"}
        )
        self._most.layout.width = "220px"
        self._ask = _button("Set limit", "No more rollouts are admitted than this", self._on_ask)
        self._lift = _button("Lift limit", "The recipe's own cap is in force again", self._on_lift)
        self._said = widgets.HTML()
        grid = widgets.GridBox(
            [self._panel[name] for name in FIGURES],
            layout={"grid_template_columns": "repeat(auto-fit, minmax(300px, 1fr))", "grid_gap": "14px 24px"},
        )
        controls = widgets.HBox([self._stop, self._most, self._ask, self._lift], layout={"flex_flow": "row wrap"})
        super().__init__(
            [widgets.HTML(STYLE), self._panel["verdict"], self._panel["progress"], controls, self._said, grid]
        )
        self.add_class("rlkit-live")
        self.refresh()

    def watch(self, on_over: Callable[[], None] | None = None) -> LiveView:
        """Look again every few seconds, in a thread, until the run is over; returns at once.

        `on_over` is called in that thread after the last look.
        """
        self._on_over = on_over
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep_looking, name="rlkit-live", daemon=True)
            self._thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the watched run is over; False when it still goes on after `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def refresh(self) -> Look | None:
        """Look once and change what changed; None, and the reason on the page, when the run cannot be read now."""
        try:
            look = self._source.look()
            same = self.last is not None and look.frame is self.last.frame
            after = panels(look, self._shown if same else None)
        except (RlkitError, OSError) as error:
            self._say(str(error))
            return None
        for name, text in changed(self._shown, after).items():
            self._panel[name].value = text
        self._shown, self.last = after, look
        self._offer(look)
        return look

    def _keep_looking(self) -> None:
        look = self.refresh()
        while look is None or not look.over:
            time.sleep(self._every_s)
            look = self.refresh()
        self._said.value = ""  # what was asked for while it went on is no longer so
        if self._on_over is not None:
            self._on_over()

    def _offer(self, look: Look) -> None:
        cannot_stop, cannot_ask = self._source.cannot()
        self._stop.disabled = bool(cannot_stop)
        for one in (self._most, self._ask, self._lift):
            one.disabled = bool(cannot_ask)
        ceiling = None if look.recipe is None else look.recipe.inflight_limit
        if ceiling is not None and self._most.max != ceiling:
            self._most.max = self._most.value = ceiling
        self._ask.tooltip = cannot_ask or "No more rollouts are admitted than this"

    def _on_stop(self, _: object) -> None:
        self._do(self._source.stop, "The run is asked to stop; its jobs take some seconds.")

    def _on_ask(self, _: object) -> None:
        most = int(self._most.value)
        self._do(lambda: self._source.ask(most), f"At most {most} rollouts are admitted from the next reading on.")

    def _on_lift(self, _: object) -> None:
        self._do(lambda: self._source.ask(None), "The limit is lifted; the recipe's own cap is in force again.")

    def _do(self, action: Callable[[], object], done: str) -> None:
        try:
            action()
        except RlkitError as error:
            self._say(str(error))
        else:
            self._say(done)

    def _say(self, text: str) -> None:
        self._said.value = f'<p role="status">{escape(text)}</p>'

    def _repr_mimebundle_(self, **options: Any) -> Mapping[str, Any]:
        bundle = dict(super()._repr_mimebundle_(**options) or {})
        return bundle | ({"text/html": page(self._shown)} if self._shown else {})


def _button(label: str, tooltip: str, pressed: Callable[[object], None]) -> widgets.Button:
    button = widgets.Button(description=label, tooltip=tooltip, layout={"width": "auto"})
    button.on_click(pressed)
    return button
