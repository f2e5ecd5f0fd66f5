"""What was changed from one run's recipe to another's, as data and to read. Pure."""

from __future__ import annotations

import pandas as pd

from rlkit.recipe import Recipe, recipe_diff, spelled

Changed = list[tuple[str, object, object]]  # name, old, new


def run_changes(before: Recipe, now: Recipe) -> Changed:
    """The fields that differ between two runs: where they are logged (`tracking`) is no change of a run."""
    return [change for change in recipe_diff(before, now) if not change[0].startswith("tracking.")]


def changes_table(before: Recipe | None, now: Recipe | None) -> pd.DataFrame:
    """A row a field (Field, Before, Now), its values as YAML spells them; no rows when nothing changed or is known."""
    known = [] if before is None or now is None else run_changes(before, now)
    rows = [(name, spelled(old), spelled(new)) for name, old, new in known]
    return pd.DataFrame(rows, columns=["Field", "Before", "Now"])
