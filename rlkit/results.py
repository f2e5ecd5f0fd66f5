"""What a run leaves in its folder once it is over: its metrics, the verdict, the report."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.errors import BadInput, NotLogged, RlkitError
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

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
    Until those of a rented run are fetched there are the steps that its trainer said.
    """
    from rlkit.engines.state import read_state, state_in_words
    from rlkit.step_rows import frame_of_steps
    from rlkit.tracking import Run, load_frame, load_run

    if not folder.recipe.is_file():
        raise BadInput(f"{folder.path}: not a run folder, it has no {folder.recipe.name}")
    recipe = load_recipe(folder.recipe)
    if folder.metrics.exists() and read_state(folder).get("status") != "running":
        return load_frame(folder.metrics), recipe
    try:
        return load_run(recipe.tracking.project, folder.name, source=trackio_source(recipe, folder)), recipe
    except NotLogged:
        has_steps = folder.steps.exists() and folder.steps.stat().st_size > 0
        if has_steps and recipe.engine != "hf":
            raise  # it has logged steps, but not where they are looked for now
        if has_steps and not (frame := frame_of_steps(folder.steps)).empty:
            return Run(recipe.tracking.project, folder.name, "", {}, recipe, frame), recipe
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
    run = replace(run, frame=_with_lost_steps(run.frame, folder.steps))
    save_frame(run, folder.metrics)
    return run


def _with_lost_steps(frame: pd.DataFrame, steps: Path) -> pd.DataFrame:
    """The frame with the steps that only `steps` (steps.jsonl) has, their timestamps between those of their neighbours.

    trackio writes in batches: a trainer that is killed loses the newest, and the run that resumes does not repeat them.
    """
    import numpy as np
    import pandas as pd

    from rlkit.step_rows import rows_of

    rows = rows_of(steps) if steps.is_file() else ()
    logged = {int(row.pop("global_step")): row for row in rows if "global_step" in row}
    lost = sorted(set(logged) - set(frame.index))
    if not lost or frame.empty:
        return frame
    whole: pd.DataFrame = frame.reindex(sorted({*frame.index, *lost}))
    whole.index.name = frame.index.name
    whole.update(pd.DataFrame.from_dict({step: logged[step] for step in lost}, orient="index").astype(float))
    seconds = frame["timestamp"].astype("datetime64[ns, UTC]").astype("int64")
    between = np.interp(whole.index, frame.index, seconds).astype("int64")
    whole["timestamp"] = pd.to_datetime(between, unit="ns", utc=True).astype(frame["timestamp"].dtype)
    return whole
