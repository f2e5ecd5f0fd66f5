"""Runs to compare, made in memory; their frames are written out, so that figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
from recorded_runs import recipe

from rlkit.diagnosis import diagnose
from rlkit.past_run import PastRun
from rlkit.recipe import Recipe

START = pd.Timestamp("2026-01-05 12:00", tz="UTC")
# Of both runs below.
PLAN = ("train.steps=40", "rollout.weight_sync_steps=4", "hardware.usd_per_hour=36")


def steps(count: int = 20, every_sync: int = 4, **metrics: float) -> pd.DataFrame:
    """Steps of the same values each; a weight sync at every `every_sync`th, where `perf__weight_sync...` are given."""
    named = {name.replace("__", "/"): [value] * count for name, value in metrics.items()}
    frame = pd.DataFrame(named, index=pd.RangeIndex(1, count + 1, name="global_step"), dtype="float64")
    for name in frame:
        if "weight_sync" in str(name):
            frame.loc[frame.index % every_sync != 0, name] = float("nan")
    seconds = metrics.get("perf__step_s", 1.0)
    return frame.assign(timestamp=START + pd.to_timedelta(frame.index * seconds, unit="s"))


def past_run(
    name: str, frame: pd.DataFrame, *overrides: str, proxy: dict[str, Any] | None = None, logged_recipe: bool = True
) -> PastRun:
    """A run as `open_past_run` gives it, its recipe the recorded runs' with `overrides`."""
    plan: Recipe | None = recipe().with_overrides([f"name={name}", *overrides]) if logged_recipe else None
    verdict = diagnose(frame, plan)
    return PastRun(name, "several", frame, plan, {}, {}, proxy or {}, {}, None, verdict)


def trainer_bound(name: str = "slow", *overrides: str, proxy: dict[str, Any] | None = None) -> PastRun:
    """4 s a step, 3 s of it forward and backward; the queue is full, and every fourth step syncs for 2 s."""
    frame = steps(
        perf__step_s=4, perf__fwd_bwd_s=3, perf__rollout_wait_s=0.01, sample__rollout_queue_size=224,
        rollout__backpressure_s=2, rollout__inflight=64, rollout__generated_tok_s=1000, sample__staleness_mean=1.5,
        batch__samples_per_step=64, perf__mfu_fwd_bwd=4, perf__weight_sync_s=2, perf__weight_sync_pause_s=0.25,
        perf__weight_sync_barrier_s=0, perf__weight_sync_transfer_s=0.5,
    )  # fmt: skip
    return past_run(name, frame, *PLAN, *overrides, proxy=proxy)


def generation_bound(name: str = "fast", *overrides: str, proxy: dict[str, Any] | None = None) -> PastRun:
    """1 s a step, half of it waiting at an empty queue."""
    frame = steps(
        perf__step_s=1, perf__fwd_bwd_s=0.4, perf__rollout_wait_s=0.5, sample__rollout_queue_size=4,
        rollout__inflight=64, rollout__generated_tok_s=4000, sample__staleness_mean=0.5, batch__samples_per_step=64,
        perf__mfu_fwd_bwd=20,
    )  # fmt: skip
    return past_run(name, frame, *PLAN, *overrides, proxy=proxy)
