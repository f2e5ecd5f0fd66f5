"""What the notebook of one point does: run its recipe in its folder, and read the run back."""

from __future__ import annotations

from pathlib import Path

from rlkit.past_run import PastRun, open_past_run
from rlkit.progress import LineProgress
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder
from rlkit.run_once import run_once


def run_point(recipe: str, folder: str) -> PastRun:
    """Run a recipe's file in a folder, or go on with the run that is there; its metrics and verdict stay in the folder.

    A run that had finished when its notebook was killed is only read. Raises RlkitError as the engine does.
    """
    plan, target = load_recipe(recipe), RunFolder(Path(folder))
    with LineProgress(print) as progress:
        run_once(plan, target, progress)
    return open_past_run(folder=folder)
