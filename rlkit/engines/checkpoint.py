"""Whether a folder may hold a run of a recipe, and which checkpoint the run resumes from."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from rlkit.engines.state import has_finished
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe, recipe_diff
from rlkit.results import logged_names
from rlkit.run_folder import RunFolder

# The Trainer writes this file after model, optimizer and random state, so a checkpoint that has it whole is whole.
LAST_WRITTEN = "trainer_state.json"


def claim_folder(recipe: Recipe, folder: RunFolder) -> Path | None:
    """Write the recipe into its folder and return the checkpoint to resume from, if any.

    Raises BadInput for the folder of another recipe, of a finished run, or of one past its last step, and for a fresh
    run under a name that trackio knows.
    """
    steps, checkpoint = recipe.train.steps, newest_checkpoint(folder.shared)
    if folder.recipe.exists():
        changes = recipe_diff(load_recipe(folder.recipe), recipe)
        # More steps continue a run; any other change makes it another run.
        others = [f"{name}: {old} -> {new}" for name, old, new in changes if name != "train.steps"]
        if others:
            raise BadInput(f"{folder.path} holds a run of another recipe ({'; '.join(others)}); choose another --name")
        if has_finished(folder):
            ended = f"{folder.path} holds a finished run"
            if checkpoint is None:
                raise BadInput(f"{ended} without a checkpoint to go on from; choose another --name")
            if checkpoint_step(checkpoint) >= steps:
                raise BadInput(f"{ended}; choose another --name, or raise train.steps to go on")
        if checkpoint is not None and checkpoint_step(checkpoint) > steps:
            raise BadInput(f"{folder.path} holds a run past step {steps} ({checkpoint.name}); choose another --name")
    if checkpoint is None and not folder.steps.exists():
        _refuse_a_taken_name(recipe, folder)
    folder.recipe.write_text(recipe.to_yaml())
    # A trainer takes a step before it looks at their number, so from the last step's checkpoint it would take one more.
    return newest_checkpoint(folder.shared, before=steps)


def newest_checkpoint(output_dir: Path, before: float = math.inf) -> Path | None:
    """The complete `checkpoint-<step>` of the highest step below `before`, or None; passes over half-written ones."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in found if checkpoint_step(path) < before]
    return next((path for path in sorted(found, key=checkpoint_step, reverse=True) if _complete(path)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The optimizer step a checkpoint was taken after."""
    return int(checkpoint.name.rpartition("-")[2])


def _refuse_a_taken_name(recipe: Recipe, folder: RunFolder) -> None:
    """A fresh run under a name that trackio knows would be appended to the old one: two runs read as one."""
    if folder.name in logged_names(recipe):
        project = recipe.tracking.project
        raise BadInput(f"trackio's project {project!r} already has a run {folder.name!r}; choose another --name")


def _complete(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / LAST_WRITTEN).read_text()), dict)
    except (OSError, ValueError):
        return False
