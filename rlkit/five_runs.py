"""The published chase, run again: five recipes one after the other, each the change that the run before asked for.

A run that is there already, of the same recipe and as long, is not made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.engines import OnEvent
from rlkit.engines.state import has_finished, read_state
from rlkit.errors import BadInput
from rlkit.past_run import PastRun, open_past_run, open_past_runs
from rlkit.recipe import Recipe, load_recipe, recipe_diff
from rlkit.results import logged_names
from rlkit.run_folder import RunFolder, free_folder
from rlkit.run_once import run_once
from rlkit.simulation.published import PublishedRun, published_runs

CHASE = "five_run_chase"


def published_chase() -> list[PublishedRun]:
    """The five published runs in their order."""
    return [run for run in published_runs() if run.experiment == CHASE]


def open_chase(
    runs: Sequence[str],
    recipes: Sequence[str],
    engine: str,
    steps: int,
    seed: int,
    out: Path,
    source: str = "",
    on_event: OnEvent = lambda event: None,
) -> dict[str, PastRun]:
    """The runs that are given, as `open_past_runs` reads them; without any, those of the recipes, run first.

    `recipes` are files, none of them the published five. `steps` 0 runs each for as many steps as were published, and
    another recipe for its own. Raises BadInput, RunFailed for the first that breaks.
    """
    if runs:
        return open_past_runs(runs, out, source or None)
    if engine not in ("sim", "local", ""):
        raise BadInput(
            f"engine {engine!r}: sim or local; rented hardware is started one by one by rlkit run, as it asks"
        )
    if steps < 0:
        raise BadInput(f"steps: {steps} is no number of steps, give 0 for as many as were published")
    plans = [_plan(recipe, engine, seed) for recipe in _chosen(recipes)]
    names = [plan.name for plan in plans]
    rented = next((plan.name for plan in plans if plan.engine == "hf"), None)
    if rented is not None:
        raise BadInput(f"{rented}: engine hf rents hardware; start it with rlkit run, then give its folder in runs")
    if len(set(names)) < len(names):
        raise BadInput(f"recipes: two of them have one name ({', '.join(names)})")
    return {plan.name: open_past_run(str(_made(plan, steps, out, on_event).path)) for plan in plans}


def _chosen(recipes: Sequence[str]) -> list[Recipe]:
    return [load_recipe(file) for file in recipes] if recipes else [run.recipe for run in published_chase()]


def _plan(recipe: Recipe, engine: str, seed: int) -> Recipe:
    return recipe.with_overrides([f"train.seed={seed}", *([f"engine={engine}"] if engine else [])])


def _made(recipe: Recipe, steps: int, out: Path, on_event: OnEvent) -> RunFolder:
    """The folder of a finished run of the recipe: one that is there, else one that is made now."""
    length = min(recipe.train.steps, steps or _published_steps(recipe) or recipe.train.steps)
    if recipe.engine != "sim":
        recipe = recipe.with_overrides([f"train.steps={length}"])
    for folder in _there(out, recipe.name):
        if (
            has_finished(folder)
            and read_state(folder).get("steps") == length
            and not recipe_diff(load_recipe(folder.recipe), recipe)
        ):
            return folder
    folder = RunFolder(out / _free(out, recipe))
    run_once(recipe, folder, on_event, stop_after=length)
    return folder


def _published_steps(recipe: Recipe) -> int | None:
    return next((run.steps_run for run in published_chase() if run.name == recipe.name), None)


def _there(out: Path, name: str) -> Iterator[RunFolder]:
    for path in sorted(out.glob(f"{name}*")):
        if re.fullmatch(rf"{re.escape(name)}(-\d+)?", path.name) and (path / "recipe.yaml").is_file():
            yield RunFolder(path)


def _free(out: Path, recipe: Recipe) -> str:
    return free_folder(out, recipe.name, logged_names(recipe)).name
