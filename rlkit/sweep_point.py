"""What the notebook of one point does: run its recipe in its folder, and read the run back."""

from __future__ import annotations

from pathlib import Path

from rlkit.engines import launch
from rlkit.engines.state import read_state
from rlkit.past_run import PastRun, open_past_run
from rlkit.progress import LineProgress
from rlkit.recipe import load_recipe
from rlkit.results import write_results
from rlkit.run_folder import RunFolder


def run_point(recipe: str, folder: str) -> PastRun:
    """Run a recipe's file in a folder, or go on with the run that is there; its metrics and verdict stay in the folder.

    A run that had finished when its notebook was killed is only read. Raises RlkitError as the engine does.
    """
    plan, target = load_recipe(recipe), RunFolder(Path(folder))
    if read_state(target).get("status") != "finished":
        with LineProgress(print) as progress:
            launch(plan, target, progress)
    write_results(plan, target, report=False)
    return open_past_run(folder=folder)
