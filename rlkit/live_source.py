"""Where a view of a run that goes on looks: the run's folder, or a trackio project that somebody else writes."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import pandas as pd

from rlkit.admission import asked
from rlkit.engines.state import is_going_on, read_state, state_in_words
from rlkit.engines.stopping import ask_to_stop
from rlkit.errors import BadInput, NotLogged
from rlkit.live import Look
from rlkit.recipe import load_recipe
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.step_rows import frame_of_rows, frame_of_steps
from rlkit.tracking import load_run

# Of a run that only trackio knows nobody says whether it ended; the slowest published run took 25 s a step.
SILENT_AFTER = timedelta(minutes=10)
LOG_LINES = 6
_TAIL_BYTES = 8192


class Source(Protocol):
    """A run that can be looked at again and again, and perhaps be told something."""

    def look(self) -> Look:
        """What is known of it now. Raises BadInput for a run that is not there."""

    def stop(self) -> None:
        """End the run. Raises BadInput when that cannot be done from here."""

    def ask(self, most: int | None) -> None:
        """Set or lift the limit of rollouts in flight. Raises BadInput when that cannot be done from here."""

    def cannot(self) -> tuple[str, str]:
        """Why the run can not be stopped, and its cap not be changed; empty where it can."""


class FolderSource:
    """A run by its folder, from the first moment on: the engine need not have made the folder yet.

    `process` is the engine where it was started from here (`rlkit.engines.background`).
    """

    def __init__(self, folder: RunFolder, process: Popen[bytes] | None = None) -> None:
        self._folder, self._process = folder, process
        self._read: tuple[tuple[int, int], pd.DataFrame] | None = None

    def look(self) -> Look:
        """What the folder's files say, and whether its engine is alive."""
        folder = self._folder
        going_on, starting = is_going_on(folder), self._starting()
        alive = self._process is not None and self._process.poll() is None
        recipe = load_recipe(folder.recipe) if folder.recipe.is_file() else None
        decision = _last_json(folder.cap)
        return Look(
            name=folder.name,
            frame=self._frame(going_on),
            recipe=recipe,
            status=_status(folder, starting, writing=alive and not starting and not going_on),
            going_on=going_on or starting,
            over=not going_on and not alive and (self._process is not None or bool(read_state(folder))),
            at=datetime.now(UTC),
            log=tuple(_tail(folder.engine_log)[-LOG_LINES:]),
            cap=str(decision.get("text", "")) if going_on else "",
        )

    def stop(self) -> None:
        """As Ctrl-C where the run was started; the folder can be resumed afterwards."""
        if self._starting() and self._process is not None:
            self._process.terminate()
        else:
            ask_to_stop(self._folder)

    def ask(self, most: int | None) -> None:
        """Through the folder's control file, which the rollout worker reads."""
        asked.ask(self._folder.control, most, load_recipe(self._folder.recipe))

    def cannot(self) -> tuple[str, str]:
        """Both need a run that goes on; the cap a recipe that has one, on this machine."""
        if self._starting():
            return "", "it is starting"
        if not is_going_on(self._folder):
            words = state_in_words(self._folder)
            return words, words
        with suppress(BadInput):
            return "", asked.why_not(load_recipe(self._folder.recipe)) or ""
        return "", "its recipe cannot be read"

    def _starting(self) -> bool:
        """Whether the engine is alive and has not said so in the folder yet."""
        process = self._process
        return process is not None and process.poll() is None and read_state(self._folder).get("pid") != process.pid

    def _frame(self, going_on: bool) -> pd.DataFrame:
        try:
            stat = self._folder.steps.stat()
        except FileNotFoundError:
            return self._saved() if not going_on else frame_of_rows([], datetime.now(UTC))
        version = (stat.st_size, stat.st_mtime_ns)
        if self._read is None or self._read[0] != version:
            self._read = version, frame_of_steps(self._folder.steps)
        return self._read[1]

    def _saved(self) -> pd.DataFrame:
        with suppress(BadInput):
            return read_run(self._folder)[0].frame
        return frame_of_rows([], datetime.now(UTC))


class ProjectSource:
    """A run of a trackio project, on this machine, a server or a Space; it can be watched, not told anything."""

    def __init__(self, project: str, name: str | None = None, source: str | Path | None = None) -> None:
        self._project, self._name, self._source = project, name, source

    def look(self) -> Look:
        """The run as trackio has it; one that has not logged for `SILENT_AFTER` counts as over."""
        now = datetime.now(UTC)
        try:
            run = load_run(self._project, self._name, source=self._source)
        except NotLogged as waiting:
            empty = frame_of_rows([], now)
            return Look(self._name or self._project, empty, None, str(waiting), True, False, now)
        silent = now - run.frame["timestamp"].max().to_pydatetime()
        going_on = silent < SILENT_AFTER
        status = "it logs" if going_on else f"it logged last {silent.total_seconds() / 60:.0f} minutes ago"
        return Look(run.name, run.frame, run.recipe, status, going_on, not going_on, now)

    def stop(self) -> None:
        """Not from here."""
        raise BadInput(self.cannot()[0])

    def ask(self, most: int | None) -> None:
        """Not from here."""
        raise BadInput(self.cannot()[1])

    def cannot(self) -> tuple[str, str]:
        """What is written in a database takes no orders."""
        why = "a run read from trackio can only be watched; give its folder"
        return why, why


def _status(folder: RunFolder, starting: bool, writing: bool) -> str:
    if starting:
        return "it is starting"
    return f"{state_in_words(folder)}, its report is being written" if writing else state_in_words(folder)


def _last_json(path: Path) -> dict[str, Any]:
    for line in reversed(_tail(path)):
        with suppress(ValueError):
            content = json.loads(line)
            return content if isinstance(content, dict) else {}
    return {}


def _tail(path: Path) -> list[str]:
    """The last lines of a file, those that are complete at their beginning; none of a file that is not there."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > _TAIL_BYTES else lines
