"""How the verdict changed over a run: its steps in windows, neighbours of one verdict put together."""

from __future__ import annotations

import pandas as pd
from pydantic import BaseModel, ConfigDict

from rlkit.judgement import MANY_STEPS, Bound, judge
from rlkit.recipe import Recipe
from rlkit.settling import MIN_STEPS
from rlkit.signals import measure, step_numbers

# Enough to see a run change, few enough to stay fast with ten thousand steps.
MOST_WINDOWS = 8


class Stretch(BaseModel):
    """Steps of a run, both ends included, that one side bounds, and what decided in its first window."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    first_step: float
    last_step: float
    bound: Bound
    reason: str


def timeline(settled: pd.DataFrame, recipe: Recipe | None) -> list[Stretch]:
    """The stretches of a run's settled steps, in order; one window for a short run, none for one too short to judge."""
    if len(settled) < MIN_STEPS:
        return []
    windows = max(1, min(MOST_WINDOWS, len(settled) // MANY_STEPS))
    steps = step_numbers(settled)
    stretches: list[Stretch] = []
    for number in range(windows):
        begin, end = number * len(settled) // windows, (number + 1) * len(settled) // windows
        judgement = judge(measure(settled.iloc[begin:end], recipe))
        if stretches and stretches[-1].bound == judgement.bound:
            stretches[-1] = stretches[-1].model_copy(update={"last_step": float(steps[end - 1])})
        else:
            stretches.append(
                Stretch(
                    first_step=float(steps[begin]),
                    last_step=float(steps[end - 1]),
                    bound=judgement.bound,
                    reason=judgement.reason,
                )
            )
    return stretches
