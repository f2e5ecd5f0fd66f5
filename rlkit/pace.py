"""How long a run takes, from the steps it logged: seconds of a mean step, minutes of all of them."""

from __future__ import annotations

import math

import pandas as pd

from rlkit.ledger import step_seconds
from rlkit.recipe import Recipe
from rlkit.rows import in_order
from rlkit.signals import column, row_interval, settled_steps, step_numbers


def mean_step_s(frame: pd.DataFrame, recipe: Recipe | None) -> float | None:
    """Seconds of a step past the warm-up, the weight sync spread over the steps between two; None when none is timed.

    A log of few steps may hold one sync more or fewer than its share, so the two are averaged on their own. Where
    perf/step_s is not logged, the phases that are add up to a lower bound.
    """
    settled = settled_steps(frame, recipe)
    step, sync = column(settled, "perf/step_s"), column(settled, "perf/weight_sync_s")
    if step.notna().any() and (recipe is None or row_interval(settled) != 1):
        return float(step.mean())
    phases = [column(settled, f"perf/{name}_s") for name in ("fwd_bwd", "rollout_wait", "optimizer")]
    known = phases[0].notna()
    between = step - sync.fillna(0.0) if step.notna().any() else sum(p.fillna(0.0) for p in phases[1:]) + phases[0]
    mean = float(between[step.notna() | known].mean())
    if not math.isfinite(mean):
        return None
    syncs = sync.dropna()
    every = 1 if recipe is None else recipe.rollout.weight_sync_steps
    return mean + (float(syncs.mean()) / every if len(syncs) else 0.0)


def logged_steps(frame: pd.DataFrame) -> int:
    """Steps that the log is of, the last one's number: rows may be lost, or stand for several steps each."""
    return round(float(step_numbers(in_order(frame)).max())) if len(frame) else 0


def logged_minutes(frame: pd.DataFrame, recipe: Recipe | None) -> float | None:
    """Minutes of the steps that were logged, their waits and syncs included; None without any perf/step_s.

    A stopped run took what it took until then. What lies between two processes of a resumed run is none of its steps.
    """
    if not column(frame, "perf/step_s").notna().any():
        return None  # phases alone leave out what no phase is timed of
    return run_minutes(frame, recipe, logged_steps(frame))


def run_minutes(frame: pd.DataFrame, recipe: Recipe | None, steps: int) -> float | None:
    """Minutes of `steps` steps: those logged as long as they took, the others a mean step each.

    The first step of a process has no perf/step_s: its phases, and the sync before it, are all there is.
    """
    mean = mean_step_s(frame, recipe)
    frame = in_order(frame).iloc[:steps]
    timed = frame[column(frame, "perf/step_s").notna() | column(frame, "perf/fwd_bwd_s").notna()]
    if timed.empty:
        return None
    every = row_interval(frame)
    known = min(float(steps), len(timed) * every)
    seconds = float(step_seconds(timed).sum()) * every
    if known < steps and mean is None:
        return None
    return (seconds + (steps - known) * (mean or 0.0)) / 60
