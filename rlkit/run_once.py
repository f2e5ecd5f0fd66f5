"""A run that is made once: launched unless it has finished in its folder before, then read back with its verdict."""

from __future__ import annotations

from rlkit.diagnosis import Verdict, diagnose
from rlkit.engines import OnEvent, launch
from rlkit.engines.base import Confirm, agree
from rlkit.engines.sim import launch_sim
from rlkit.engines.state import has_finished
from rlkit.recipe import Recipe
from rlkit.results import read_run, write_results
from rlkit.run_folder import RunFolder


def run_once(
    recipe: Recipe, folder: RunFolder, on_event: OnEvent, confirm: Confirm = agree, stop_after: int | None = None
) -> Verdict:
    """Make the run, or go on with it, and write its results; a finished one is only read, from its own folder.

    `stop_after` leaves a simulated run after so many steps. Raises RlkitError as the engine does.
    """
    if has_finished(folder):
        if folder.metrics.is_file() and folder.verdict.is_file():  # else it was killed before they were written
            run, known = read_run(folder)
            return diagnose(run.frame, run.recipe or known)
    elif stop_after is not None and recipe.engine == "sim":
        launch_sim(recipe, folder, on_event, stop_after=stop_after)
    else:
        launch(recipe, folder, on_event, confirm=confirm)
    return write_results(recipe, folder, report=False)
