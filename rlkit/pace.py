"""How long a run takes, from the steps it logged: seconds of a mean step, minutes of all of them."""

from __future__ import annotations

import math

import pandas as pd

from rlkit.recipe import Recipe
from rlkit.rows import in_order
from rlkit.signals import column, row_interval, settled_steps


def mean_step_s(frame: pd.DataFrame, recipe: Recipe) -> float | None:
    """Seconds of a step past the warm-up, the weight sync spread over the steps between two; None when none is timed.

    A log of few steps may hold one sync more or fewer than its share, so the two are averaged on their own. Where
    perf/step_s is not logged, the phases that are add up to a lower bound.
    """
    settled = settled_steps(frame, recipe)
    step, sync = column(settled, "perf/step_s"), column(settled, "perf/weight_sync_s")
    if step.notna().any() and row_interval(settled) != 1:
        return float(step.mean())
    phases = [column(settled, f"perf/{name}_s") for name in ("fwd_bwd", "rollout_wait", "optimizer")]
    known = phases[0].notna()
    between = step - sync.fillna(0.0) if step.notna().any() else sum(p.fillna(0.0) for p in phases[1:]) + phases[0]
    mean = float(between[step.notna() | known].mean())
    if not math.isfinite(mean):
        return None
    syncs = sync.dropna()
    return mean + (float(syncs.mean()) / recipe.rollout.weight_sync_steps if len(syncs) else 0.0)


def run_minutes(frame: pd.DataFrame, recipe: Recipe, steps: int) -> float | None:
    """Minutes of `steps` steps: those logged as long as they took, the others a mean step each."""
    mean = mean_step_s(frame, recipe)
    if mean is None:
        return None
    frame = in_order(frame)
    took = column(frame, "perf/step_s").iloc[:steps]
    every = row_interval(frame)
    logged = min(float(steps), float(took.notna().sum()) * every)
    return (float(took.sum()) * every + (steps - logged) * mean) / 60
