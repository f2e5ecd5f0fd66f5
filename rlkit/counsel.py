"""Advice as data: what a run's recipe takes and costs, a change of it with what that would bring, and all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import pandas as pd

from rlkit.errors import BadInput
from rlkit.pace import mean_step_s, run_minutes
from rlkit.price import usd_of
from rlkit.recipe import Recipe
from rlkit.signals import measure, settled_steps
from rlkit.simulation.twin import Twin

Objective = Literal["time", "cost"]


@dataclass(frozen=True)
class Limits:
    """What the whole run may take and cost at most; None: no limit."""

    deadline_min: float | None = None
    budget_usd: float | None = None

    def excess(self, minutes: float, usd: float | None) -> float:
        """1 within the limits, and as many times more as they are exceeded."""
        late = minutes / self.deadline_min if self.deadline_min else 1.0
        dear = usd / self.budget_usd if self.budget_usd and usd is not None else 1.0
        return max(1.0, late) * max(1.0, dear)


@dataclass(frozen=True)
class Figures:
    """A recipe's run: seconds of a mean step, minutes of all steps, their price where an hour's is known."""

    step_s: float
    wall_clock_min: float
    usd: float | None
    device_hours: float  # of the price, where none is known: devices of trainer and replicas x hours
    staleness: float | None
    dropped_per_trained: float | None
    samples_per_step: float | None
    wait_share: float | None

    @property
    def cost(self) -> float:
        """USD, or device hours without a price."""
        return self.device_hours if self.usd is None else self.usd


@dataclass(frozen=True)
class Advice:
    """One change of the recipe, what it is predicted to bring, and what else it does."""

    slug: str
    causes: tuple[str, ...]  # those of the verdict that it answers; empty: nothing the verdict names
    overrides: tuple[str, ...]  # as --set takes them
    fields: tuple[tuple[str, Any, Any], ...]  # name, before, after; the price of an hour with them
    predicted: Figures
    gain: float  # of minutes or cost, whichever is the objective: 0.2 is a fifth less
    side_effects: tuple[str, ...]
    learning: bool

    @property
    def changes(self) -> str:
        """`train.token_budget 0 -> 16384, ...`, without the price."""
        told = [f"{name} {old} -> {new}" for name, old, new in self.fields if name != "hardware.usd_per_hour"]
        return ", ".join(told)


@dataclass(frozen=True)
class Refused:
    """A change that is not advised, and why."""

    overrides: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Counsel:
    """All advice for one run, the best first; `as_it_is` is measured, the rest predicted from it."""

    objective: Objective
    as_it_is: Figures
    twin: Twin
    advice: tuple[Advice, ...]
    refused: tuple[Refused, ...]
    unanswered: tuple[str, ...]  # what to do about causes that no field of the recipe answers
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"twin": self.twin.to_dict()}


def score(figures: Figures, objective: Objective, limits: Limits) -> float:
    """What is to be small: minutes or cost, times what exceeds a limit."""
    of = figures.wall_clock_min if objective == "time" else figures.cost
    return of * limits.excess(figures.wall_clock_min, figures.usd)


def measured_figures(frame: pd.DataFrame, recipe: Recipe, steps: int | None = None) -> Figures:
    """What the run in `frame` says of `steps` steps (None: the recipe's). Raises BadInput when no step is timed."""
    step_s, minutes = mean_step_s(frame, recipe), run_minutes(frame, recipe, steps or recipe.train.steps)
    if step_s is None or minutes is None:
        raise BadInput("the run has no timed step after its warm-up: nothing to predict by")
    signals = measure(settled_steps(frame, recipe), recipe)
    return Figures(
        step_s,
        minutes,
        *costs(recipe, minutes),
        staleness=signals.staleness_mean,
        dropped_per_trained=signals.dropped_per_trained,
        samples_per_step=signals.samples_per_step,
        wait_share=signals.wait_share,
    )


def costs(recipe: Recipe, minutes: float) -> tuple[float | None, float]:
    """USD (None without a price) and device hours of so many minutes."""
    serve = recipe.serve
    devices = recipe.train.processes + serve.engines * serve.tensor_parallel_size
    return usd_of(recipe, minutes), devices * minutes / 60
