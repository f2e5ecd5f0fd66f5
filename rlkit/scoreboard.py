"""Several runs in, one tidy row a run out: how fast, what it cost, what bounded it, and the change that led to it.

Frames of numbers, with NaN or None where a run does not say; `rlkit.scoreboard_text` makes them tables to read. One
statistic for a figure in all runs, that by which `rlkit.simulation.cells` compares with published ones, over the steps
after the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from rlkit.engines.state import read_state
from rlkit.ledger import wall_clock_s
from rlkit.pace import logged_minutes, logged_steps, run_minutes
from rlkit.past_run import PastRun
from rlkit.price import usd_of, usd_paid
from rlkit.recipe import Recipe, spelled
from rlkit.recipe_changes import run_changes
from rlkit.signals import column, settled_steps
from rlkit.wording import number

# A load that took more attempts than this is one of "more": the published syncs took two or three.
COUNTED_ATTEMPTS = 3
# More fields than this are no change of a run but another run.
MOST_CHANGES = 4
DECISIONS = ("affinity", "spilled", "unmatched", "round_robin")


@dataclass(frozen=True)
class Figure:
    """A column of the scoreboard that is one statistic of one of TRL's metrics."""

    name: str
    metric: str
    statistic: Literal["median", "mean"]


FIGURES = (
    Figure("step_s", "perf/step_s", "median"),
    Figure("fwd_bwd_s", "perf/fwd_bwd_s", "median"),
    Figure("rollout_wait_s", "perf/rollout_wait_s", "median"),
    Figure("queue", "sample/rollout_queue_size", "median"),
    Figure("backpressure_s", "rollout/backpressure_s", "mean"),
    Figure("staleness", "sample/staleness_mean", "mean"),
    Figure("generated_tok_s", "rollout/generated_tok_s", "mean"),
    Figure("samples_per_step", "batch/samples_per_step", "mean"),
    Figure("mfu", "perf/mfu_fwd_bwd", "median"),
    Figure("weight_sync_s", "perf/weight_sync_s", "median"),
)


def scoreboard(runs: Mapping[str, PastRun]) -> pd.DataFrame:
    """One row a run in the order given, indexed by `run`.

    `steps`, `minutes` and `usd` are those that were logged; `recipe_minutes` and `recipe_usd` those of all the
    recipe's steps, the ones that are missing taken as long as the mean of the steps after the start. Seconds are of
    one step, `settled` counts the steps after the start, which they are taken from; `mfu` is in percent, `staleness`
    in policy versions, `samples_s` the samples trained on per second. `change` is what differs from the recipe of the
    run before (None: unknown); `bound`, `cause`, `confidence` and `next` are the verdict.
    """
    rows = []
    before: PastRun | None = None
    for label, run in runs.items():
        told = run.verdict
        row: dict[str, Any] = {
            "run": label,
            "engine": run.recipe.engine if run.recipe else None,
            "change": change_text(before, run),
        }
        row |= _times(run) | figures_of(run.frame, run.recipe)
        row["queue_maxsize"] = math.nan if run.recipe is None else float(run.recipe.rollout.queue_maxsize)
        row["settled"] = len(settled_steps(run.frame, run.recipe))
        row |= {"bound": told.bound, "confidence": told.confidence, "cause": told.cause, "next": told.next_action}
        rows.append(row)
        before = run
    return pd.DataFrame(rows).set_index("run")


def figures_of(frame: pd.DataFrame, recipe: Recipe | None) -> dict[str, float]:
    """The `FIGURES` of one run by name, NaN where it logged nothing, and `samples_s`."""
    settled = settled_steps(frame, recipe)
    found = {figure.name: _statistic(column(settled, figure.metric), figure.statistic) for figure in FIGURES}
    mean_step = float(column(settled, "perf/step_s").mean())
    return found | {"samples_s": found["samples_per_step"] / mean_step if mean_step else math.nan}


def is_simulated(run: PastRun) -> bool:
    """Whether a simulator made the run: it has no reward then, and its clock is the simulated one."""
    return run.recipe is not None and run.recipe.engine == "sim"


def changes(before: PastRun | None, run: PastRun) -> list[tuple[str, object, object]] | None:
    """The fields of the recipe that differ from the run before, as (name, old, new); None when that is unknown."""
    if before is None or before.recipe is None or run.recipe is None:
        return None
    return run_changes(before.recipe, run.recipe)


def change_text(before: PastRun | None, run: PastRun) -> str | None:
    """The changes as `train.token_budget 0 → 16384, ...`, `none` when there is none; None when they are unknown.

    An hour's price is left out: it follows from the others. Of two recipes that have little in common only the first
    differences are told, and how many there are.
    """
    found = changes(before, run)
    if found is None:
        return None
    found = [change for change in found if change[0] != "hardware.usd_per_hour"]
    told = [f"{name} {spelled(old)} → {spelled(new)}" for name, old, new in found]
    if len(told) > MOST_CHANGES:
        return f"{len(told)} fields: {', '.join(told[:MOST_CHANGES])}, ..."
    return ", ".join(told) or "none"


def weight_syncs(runs: Mapping[str, PastRun]) -> pd.DataFrame:
    """One row a run, indexed by `run`: how long a weight sync takes, and how often replicas were asked.

    Medians of the settled steps that synced, in seconds: `whole_s` with its extremes `low_s` and `high_s`, and of it
    `pause_s`, `save_s` (TRL's transfer) and `accept_s` (until every replica has the adapter and generates again: what
    TRL times no part of). `share` is all syncs over the wall-clock. `loads` counts adapter loads on single replicas by
    the attempts they took; they come from the proxy's counters, NaN for a run that kept none.
    """
    rows = {label: _sync(run) | _loads(run) for label, run in runs.items()}
    return pd.DataFrame(list(rows.values()), index=pd.Index(rows, name="run"))


def routing(runs: Mapping[str, PastRun]) -> pd.DataFrame:
    """One row a run, indexed by `run`: requests routed, by reason, and per replica (a text); NaN, None: no counters."""
    rows: list[dict[str, Any]] = []
    for label, run in runs.items():
        counted: dict[str, Any] = {name: _count(run.proxy.get(name)) for name in ("routed", *DECISIONS)}
        shares = [replica.get("routed") for replica in run.proxy.get("per_replica", [])]
        known = bool(shares) and all(share is not None for share in shares)
        counted["per_replica"] = " / ".join(number(float(share)) for share in shares) if known else None
        rows.append({"run": label} | counted)
    return pd.DataFrame(rows).set_index("run")


def headline(board: pd.DataFrame) -> str:
    """What the runs showed in one sentence: the times of the first and the last, and what bounded each."""
    sides = ", ".join(str(bound) for bound in board["bound"])
    if len(board) == 1:
        return f"One run, {_pace(board.iloc[0])}, bound by: {sides}."
    first, last = board.iloc[0], board.iloc[-1]
    same = first["recipe_steps"] == last["recipe_steps"] and not pd.isna(first["recipe_minutes"])
    old, new = (first["recipe_minutes"], last["recipe_minutes"]) if same else (first["step_s"], last["step_s"])
    what = f"{len(board)} runs"
    if same and not pd.isna(new):
        what += f": {number(first['recipe_steps'])} steps go from {_minutes(old)} to {_minutes(new)}"
    elif not (pd.isna(old) or pd.isna(new)):
        what += f": the median step goes from {number(old)} s to {number(new)} s"
    if not (pd.isna(old) or pd.isna(new)) and new > 0:
        what += f", {_as_fast(old / new)}"
    return f"{what}; what bounded them: {sides}."


def _as_fast(factor: float) -> str:
    times, what = (factor, "fast") if factor >= 1 else (1 / factor, "slow")
    told = number(times)
    return "as fast" if told == "1" else f"{told} times as {what}"


def _pace(row: pd.Series[Any]) -> str:
    return "of unknown pace" if pd.isna(row["step_s"]) else f"{number(row['step_s'])} s a step"


def _minutes(minutes: float) -> str:
    return f"{number(minutes)} min" if minutes >= 2 else f"{number(60 * minutes)} s"


def _times(run: PastRun) -> dict[str, float]:
    recipe, steps = run.recipe, logged_steps(run.frame)
    minutes = logged_minutes(run.frame, recipe)
    whole = (
        None if recipe is None or minutes is None else run_minutes(run.frame, recipe, max(steps, recipe.train.steps))
    )
    paid = None if run.folder is None else usd_paid(read_state(run.folder))
    usd = None if recipe is None else usd_of(recipe, minutes)
    found = {
        "minutes": minutes,
        "usd": usd if paid is None else paid,
        "recipe_steps": None if recipe is None else recipe.train.steps,
        "recipe_minutes": whole,
        "recipe_usd": None if recipe is None else usd_of(recipe, whole),
    }
    return {"steps": float(steps)} | {name: math.nan if one is None else float(one) for name, one in found.items()}


def _sync(run: PastRun) -> dict[str, float]:
    settled = settled_steps(run.frame, run.recipe)
    whole, pause, barrier, save = (
        column(settled, f"perf/weight_sync_{part}s") for part in ("", "pause_", "barrier_", "transfer_")
    )
    logged = column(run.frame, "perf/weight_sync_s")
    seconds = wall_clock_s(run.frame)
    return {
        "syncs": float(logged.notna().sum()),
        "whole_s": float(whole.median()),
        "low_s": float(whole.min()),
        "high_s": float(whole.max()),
        "pause_s": float(pause.median()),
        "save_s": float(save.median()),
        "accept_s": float((whole - pause - barrier.fillna(0.0) - save).median()),
        "share": float(logged.sum()) / seconds if seconds and logged.notna().any() else math.nan,
    }


def _loads(run: PastRun) -> dict[str, float]:
    names = ["loads", *(f"attempts_{count}" for count in range(1, COUNTED_ATTEMPTS + 1)), "attempts_more"]
    if not run.proxy.get("adapters"):
        return dict.fromkeys(names, math.nan)
    counted = Counter(
        min(int(attempts), COUNTED_ATTEMPTS + 1)
        for load in run.proxy["adapters"]
        for attempts in load.get("attempts", [])
        if attempts
    )
    return {"loads": float(sum(counted.values()))} | {
        name: float(counted[attempts]) for attempts, name in enumerate(names[1:], 1)
    }


def _count(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _statistic(values: pd.Series[float], statistic: str) -> float:
    return float(values.median() if statistic == "median" else values.mean())
