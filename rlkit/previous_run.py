"""The run before a run in its trackio project, and what was changed since: how a chase is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.recipe_changes import changes_table
from rlkit.tracking import Run, list_runs, load_run


@dataclass(frozen=True)
class PreviousRun:
    """A run of the same project that began before, and its recipe."""

    name: str
    recipe: Recipe

    def changes(self, recipe: Recipe) -> pd.DataFrame:
        """What `recipe` has differently, as `changes_table` tells it."""
        return changes_table(self.recipe, recipe)


def find_previous(run: Run, source: str | Path | None) -> PreviousRun | None:
    """The newest run of `run`'s project that began before it and kept its recipe; None where there is none to be read.

    A report is complete without it: a database that is elsewhere, or gone, is no error.
    """
    try:
        known = list_runs(run.project, source)
        name = pick_previous(known, run.run_id, run.frame["timestamp"].min())
        earlier = None if name is None else load_run(run.project, run_id=name, source=source)
    except BadInput:
        return None
    return None if earlier is None or earlier.recipe is None else PreviousRun(earlier.name, earlier.recipe)


def pick_previous(known: pd.DataFrame, run_id: str, began: Any) -> str | None:
    """The id of the newest of `known` runs (as `list_runs` has them) that began before `began`; None: there is none."""
    before = known[(known["run_id"] != run_id) & (known["created"] < began)]
    return None if before.empty else str(before.iloc[-1]["run_id"])
