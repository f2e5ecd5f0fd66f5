"""A recipe as a form edits it, and what there is to know before it is started: findings, time, cost.

Values of a form are text, read as YAML like `--set`; the recipe itself says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML

from rlkit import display
from rlkit.chart import VERMILLION
from rlkit.errors import BadInput, RlkitError
from rlkit.preflight import Finding, check, gather_facts
from rlkit.recipe import Recipe, load_recipe, spelled
from rlkit.simulation.prediction import Prediction, Spread, predict
from rlkit.wording import number

# What is changed most; every other field of a recipe is one line under "Other changes".
FIELDS = (
    *("engine", "train.steps", "train.learning_rate", "train.token_budget", "train.gradient_accumulation_steps"),
    *("rollout.max_inflight_tasks", "rollout.queue_maxsize", "rollout.max_staleness", "rollout.weight_sync_steps"),
    *("sampling.num_generations", "sampling.max_completion_length", "serve.replicas", "cap.policy"),
)
# One simulation is enough to know the order of magnitude, and takes a second or a few.
PREDICTED_SEEDS = 1


@dataclass(frozen=True)
class Plan:
    """A recipe that might be started, or the one line that says what is wrong with it; and what preflight found."""

    recipe: Recipe | None
    problem: str
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Whether nothing stands against starting it."""
        return self.recipe is not None and not any(finding.severity == "error" for finding in self.findings)


def recipes_under(folder: Path) -> list[Path]:
    """The recipes (YAML) under a folder, without those that runs left there (out) and grids (sweeps), in order."""
    found = (path for path in folder.rglob("*.yaml") if not path.name.startswith("."))
    return sorted(path for path in found if not {"out", "sweeps"} & set(path.relative_to(folder).parts))


def field_text(recipe: Recipe, field: str) -> str:
    """A field's value as a form shows it: YAML, `null` for None.

    >>> field_text(load_recipe("runs/local.yaml"), "serve.replicas")
    '2'
    """
    value: Any = recipe.to_dict()
    for part in field.split("."):
        value = value[part]
    return spelled(value)


def assignments(base: Recipe, values: Mapping[str, str], more: str) -> list[str]:
    """What a form changes in `base`, as `--set` has it: the fields whose text differs, then a line of `more` each.

    >>> assignments(load_recipe("runs/local.yaml"), {"serve.replicas": "1", "cap.policy": "rlkit"}, "name=mine")
    ['serve.replicas=1', 'name=mine']
    """
    changed = [f"{field}={text.strip()}" for field, text in values.items() if text.strip() != field_text(base, field)]
    return [*changed, *(line.strip() for line in more.splitlines() if line.strip())]


def consider(recipe: Path, overrides: Sequence[str], folder: Path | None) -> Plan:
    """The recipe with its changes, checked for this machine and the run's folder; never an exception for bad input."""
    try:
        plan = load_recipe(recipe, list(overrides))
        return Plan(plan, "", tuple(check(plan, gather_facts(plan, folder))))
    except BadInput as error:
        return Plan(None, str(error), ())


def foresee(recipe: Recipe) -> Prediction | str:
    """What the simulator makes of the recipe, or why it cannot."""
    try:
        return predict(recipe, PREDICTED_SEEDS, processes=1)
    except RlkitError as error:
        return str(error)


def readiness(plan: Plan) -> HTML:
    """Whether the plan can be started, in one bold sentence with the next action."""
    if plan.recipe is None:
        return display.statement(f"Not ready: {plan.problem}", edge=VERMILLION)
    return display.readiness(plan.recipe, plan.findings)


def plan_html(plan: Plan) -> str:
    """Ready or not, what preflight found, and what the recipe sets."""
    if plan.recipe is None:
        return str(readiness(plan).data)
    parts = [
        readiness(plan),
        display.table(display.findings(plan.findings), when_empty="Preflight found nothing to change."),
        display.table(display.settings(plan.recipe)),
        display.folded("The complete recipe", plan.recipe.to_yaml()),
    ]
    return "".join(str(part.data) for part in parts)


def prediction_html(foreseen: Prediction | str) -> str:
    """Time, cost and what bounds the run as simulated, with what of it is extrapolated."""
    if isinstance(foreseen, str):
        return str(display.note(f"How long it would take cannot be predicted: {foreseen}").data)
    rows = [
        ("Step", _figure(foreseen.step_s, "s")),
        ("In all", _figure(foreseen.wall_clock_min, "min")),
        ("Cost", "no price is known" if foreseen.usd is None else f"${foreseen.usd.mean:,.2f}"),
        ("Would be bound by", foreseen.verdict.bound),
        ("Staleness", _figure(foreseen.staleness, "versions")),
    ]
    table = display.table(pd.DataFrame(rows, columns=["Predicted", f"for {foreseen.steps:,} steps"]))
    notes = [display.note(f"Extrapolated: {note}") for note in foreseen.extrapolated]
    return "".join(str(part.data) for part in (table, *notes))


def _figure(spread: Spread, unit: str) -> str:
    return f"{number(spread.mean)} {unit}"
