"""What a run leaves in its folder once it is over: its metrics, the verdict, the report."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.errors import BadInput, NotLogged, RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder

if TYPE_CHECKING:
    from rlkit.diagnosis import Verdict
    from rlkit.tracking import Run


def write_results(recipe: Recipe, folder: RunFolder, report: bool = True) -> Verdict:
    """Read the run back from trackio; write its metrics, verdict and, with `report`, the HTML. Raises RlkitError."""
    from rlkit.diagnosis import diagnose

    run = _save_metrics(recipe, folder)
    verdict = diagnose(run.frame, run.recipe or recipe)
    folder.verdict.write_text(json.dumps(verdict.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    if report:
        from rlkit.report import report_run

        report_run(folder)
    return verdict


def keep_metrics(recipe: Recipe, folder: RunFolder) -> bool:
    """Save what an interrupted run has logged; False when there is nothing yet."""
    with suppress(RlkitError, OSError):  # it is called when something else has gone wrong already
        _save_metrics(recipe, folder)
        return True
    return False


def read_run(folder: RunFolder) -> tuple[Run, Recipe]:
    """A run and its recipe from its folder: the saved metrics, else trackio's. Raises BadInput.

    Metrics that were saved at an interruption are passed over while the run goes on, or when its engine was killed.
    """
    from rlkit.engines.state import read_state, state_in_words
    from rlkit.tracking import load_frame, load_run

    if not folder.recipe.is_file():
        raise BadInput(f"{folder.path}: not a run folder, it has no {folder.recipe.name}")
    recipe = load_recipe(folder.recipe)
    if folder.metrics.exists() and read_state(folder).get("status") != "running":
        return load_frame(folder.metrics), recipe
    try:
        return load_run(recipe.tracking.project, folder.name, source=trackio_source(recipe, folder)), recipe
    except NotLogged:
        if folder.steps.exists() and folder.steps.stat().st_size > 0:
            raise  # it has logged steps, but not where they are looked for now
        raise BadInput(f"{folder.path}: the run has no step yet; {state_in_words(folder)}") from None


def trackio_source(recipe: Recipe, folder: RunFolder) -> Path | str | None:
    """Where a run's metrics are: the database that was fetched with a run on other machines, a Space, or here."""
    fetched = folder.path / "trackio"
    return fetched if fetched.is_dir() and recipe.tracking.space_id is None else recipe.tracking.space_id


def logged_names(recipe: Recipe) -> set[str]:
    """Names of the runs that the recipe's trackio project already has.

    Raises BadInput when they cannot be read: a run under a name that is taken would be appended to the old one. A Space
    that does not answer has none, because trackio makes it when the first run starts.
    """
    from rlkit.tracking import list_runs

    project, space = recipe.tracking.project, recipe.tracking.space_id
    with suppress(NotLogged if space is None else BadInput):
        return set(list_runs(project, space)["name"])
    return set()


def _save_metrics(recipe: Recipe, folder: RunFolder) -> Run:
    from rlkit.tracking import load_run, save_frame

    run = load_run(recipe.tracking.project, folder.name, source=trackio_source(recipe, folder))
    save_frame(run, folder.metrics)
    return run
