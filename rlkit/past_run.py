"""A run that was executed, with everything a report says about it, from its folder or from trackio."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.diagnosis import Verdict, diagnose
from rlkit.engines.state import read_state, state_in_words
from rlkit.errors import BadInput, NotLogged
from rlkit.previous_run import PreviousRun, find_previous
from rlkit.recipe import Recipe
from rlkit.results import read_run, trackio_source
from rlkit.run_folder import RUNS, RunFolder
from rlkit.run_name import find_folder, no_run
from rlkit.tracking import load_run

_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True)
class PastRun:
    """One run, read back. What only a run's folder has (routing, evaluation) is empty for a run read from trackio."""

    name: str
    project: str
    frame: pd.DataFrame  # as `rlkit.tracking.Run`
    recipe: Recipe | None
    versions: dict[str, str]  # package: version
    limits: dict[str, Any]  # what bounded the pipeline, as the trainer logged it
    proxy: dict[str, Any]  # proxy.json
    evaluation: dict[str, Any]  # evaluation.json
    folder: RunFolder | None
    verdict: Verdict
    previous: PreviousRun | None = None  # the run before it in its project

    @property
    def facts(self) -> dict[str, str]:
        """Which run this is, in a few words: name, project, steps and time, start."""
        first, last = self.frame["timestamp"].min(), self.frame["timestamp"].max()
        seconds = (last - first).total_seconds()
        return {
            "run": self.name,
            "project": self.project,
            "steps": f"{self._steps()} in {f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'}",
            "started": f"{first:%Y-%m-%d %H:%M} UTC",
        }

    def _steps(self) -> str:
        """Rows of a whole run, `48`; of a part its last step, however seldom it logged: `26 of 48 (it was stopped)`."""
        whole = None if self.recipe is None else self.recipe.train.steps
        if whole is None or self.frame.empty or self.frame.index.max() >= whole:
            return str(len(self.frame))
        ended = f" ({state_in_words(self.folder)})" if self.folder is not None and read_state(self.folder) else ""
        return f"{int(self.frame.index.max())} of {whole}{ended}"

    @property
    def commands(self) -> dict[str, str]:
        """Shell commands that repeat the run and this reading of it, each with what it does."""
        if self.folder is None:
            saved = {"rlkit run recipe.yaml": "the same run, with the complete recipe above saved as recipe.yaml"}
            diagnose_it = shlex.join(["rlkit", "diagnose", self.project, "--run", self.name])
            return saved | {diagnose_it: "the verdict alone"}
        recipe = str(Path(self.where) / self.folder.recipe.name)
        return {
            shlex.join(["rlkit", "run", recipe]): "the same run again, in its own folder",
            shlex.join(["rlkit", "diagnose", self.where]): "the verdict alone",
            shlex.join(["rlkit", "report", self.where]): "this page",
        }

    @property
    def where(self) -> str:
        """What names the run on a command line: its folder, from the checkout if it is in there, or PROJECT/RUN."""
        if self.folder is None:
            return f"{self.project}/{self.name}"
        path = self.folder.path.resolve()
        return str(path.relative_to(_CHECKOUT) if path.is_relative_to(_CHECKOUT) else path)


def open_past_run(folder: str = "", project: str = "", name: str = "", source: str = "") -> PastRun:
    """A run by its folder, else by trackio project and run name (empty: the newest). Raises BadInput.

    `source` is a trackio server's URL or a Space; empty is this machine.
    """
    if not folder and not project:
        raise BadInput("folder and project are both empty: name a run's folder, or a trackio project")
    place = RunFolder(Path(folder)) if folder else None
    where: str | Path | None
    if place is None:
        run, where = load_run(project, name or None, source=source or None), source or None
        recipe = run.recipe
    else:
        run, recipe = read_run(place)
        where = trackio_source(recipe, place)
    return PastRun(
        name=run.name,
        project=run.project,
        frame=run.frame,
        recipe=recipe,
        versions=dict(run.config.get("versions", {})),
        limits=dict(run.config.get("limits", {})),
        proxy=_read(place.proxy) if place else {},
        evaluation=_read(place.evaluation) if place else {},
        folder=place,
        verdict=diagnose(run.frame, recipe),
        previous=find_previous(run, where),
    )


def open_past_runs(wanted: Sequence[str], under: Path = RUNS, source: str | None = None) -> dict[str, PastRun]:
    """Several runs by a name each, in the order given. Raises BadInput.

    A run is given by its folder, by its name `under` the folder of runs, or as PROJECT/RUN in trackio (`source` as for
    `open_past_run`). Its name here is the run's own, or as it was given where two would be called the same.
    """
    found = [_open(one, under, source) for one in wanted]
    names = [run.name for run in found]
    labels = [run.name if names.count(run.name) == 1 else one for one, run in zip(wanted, found, strict=True)]
    same = [(run.project, run.name, run.folder.path.resolve() if run.folder else None) for run in found]
    twice = next((label for label, one in zip(labels, same, strict=True) if same.count(one) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice}: given twice; a run is compared with other runs")
    return dict(zip(labels, found, strict=True))


def _open(wanted: str, under: Path, source: str | None) -> PastRun:
    folder = None if source else find_folder(wanted, under)
    if folder is not None:
        return open_past_run(str(folder.path))
    project, _, name = wanted.partition("/")
    if not project or not name or Path(wanted).is_absolute() or project in (".", "..", "~"):
        ways = f"give a run's folder, the name of a run under {under}, or PROJECT/RUN in trackio"
        raise BadInput(f"{wanted}: {no_run(wanted, under)}; {ways}")
    try:
        return open_past_run(project=project, name=name, source=source or "")
    except NotLogged as error:
        raise NotLogged(f"{wanted}: not a run's folder; as PROJECT/RUN: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise BadInput(f"{path}: broken JSON") from None
    return content if isinstance(content, dict) else {}
