"""What a run's log says about where time goes: numbers only, no judgement. Metric names are TRL's (1.16).

Means over steps, not medians: a median step leaves out the weight sync whenever that happens less than every other
step, and only the mean times the number of steps is the wall-clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from rlkit.recipe import Recipe

# The pipeline starts empty: until the queue, which is made to hold max_staleness steps' worth of samples, has been
# filled and emptied once, waits and readings are those of a cold start. Step 1 comes on top: it has no perf/step_s, and
# holds the first sync and every first-use cost.
DEFAULT_STALENESS = 4  # TRL's default max_staleness, for a run whose recipe is not known
MAX_WARMUP_STEPS = 10  # a long warm-up would leave nothing of a short run; by then a queue of any size reads steadily

# Beyond this nothing was measured: a year has 3e7 seconds, a long run 1e12 tokens.
LARGEST = 1e15

# Phases are timed by clocks that overlap by the odd millisecond; more than this means that the numbers do not belong to
# one run (medians mixed with means, another run's column).
TIMER_SLACK = 1.05


@dataclass(frozen=True)
class Signals:
    """Means over the settled steps of a run; None where the log cannot say. Seconds unless named otherwise."""

    steps: int = 0  # settled steps that carry at least a phase time or a queue reading
    shares: dict[str, float] = field(default_factory=dict)  # phase -> fraction of the step; empty when unknown
    step_s: float | None = None
    fwd_bwd_s: float | None = None
    fwd_bwd_over_fwd: float | None = None  # 3 is due; 4 when the forward pass is computed twice
    rollout_wait_s: float | None = None
    wait_share: float | None = None  # of the step; an upper bound when step_s is None
    weight_sync_s: float | None = None  # one sync
    weight_sync_load_s: float | None = None  # of it, from the saved adapter to resumed replicas: the part with retries
    weight_sync_per_step_s: float | None = None  # the same, spread over the steps between two
    sync_share: float | None = None  # of the step; an upper bound when step_s is None
    phases_over_step: float | None = None  # sum of the phases / step_s; above TIMER_SLACK they contradict each other
    queue_size: float | None = None  # samples
    queue_maxsize: float | None = None  # samples
    queue_full_reading: float | None = None  # samples: what TRL's gauge shows when the queue is full
    queue_fill: float | None = None  # queue_size / queue_full_reading
    blocked_steps: float | None = None  # fraction of the steps in which a finished sample found the queue full
    backpressure_s: float | None = None  # per blocked sample
    score_blocked_steps: float | None = None  # fraction of the steps in which groups had to wait to be scored
    inflight: float | None = None  # rollouts
    inflight_limit: float | None = None  # rollouts
    inflight_cap: float | None = None  # rollouts that the admission cap allows
    generated_tok_s: float | None = None
    usable_tok_s: float | None = None  # forwarded tokens/s if the trainer never waited: the most generation could sell
    mfu_fwd_bwd: float | None = None  # percent
    mfu_wall_clock: float | None = None  # percent
    mfu_ratio: float | None = None  # wall-clock / forward+backward: the part of the step that computes
    samples_per_step: float | None = None
    samples_per_row: float | None = None
    row_tokens: float | None = None  # tokens in a row
    sample_tokens: float | None = None  # tokens in a sample, prompt included
    staleness_mean: float | None = None  # policy versions
    staleness_max: float | None = None  # policy versions
    dropped_per_trained: float | None = None  # samples thrown away as stale / samples trained on

    def numbers(self) -> dict[str, float | None]:
        """Every signal but the shares, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shares"}


def warmup_steps(recipe: Recipe | None) -> int:
    """How many steps from the start of a trainer are set aside."""
    staleness = DEFAULT_STALENESS if recipe is None else recipe.rollout.max_staleness
    return min(1 + staleness, MAX_WARMUP_STEPS)


def settled_steps(frame: pd.DataFrame, recipe: Recipe | None) -> pd.DataFrame:
    """The frame without the warm-up of the run, and without that of every resume in it.

    A step that was trained but has no perf/step_s is the first of a trainer process.
    """
    timed, trained = column(frame, "perf/step_s").notna(), column(frame, "perf/fwd_bwd_s").notna()
    resumed = (trained & ~timed).to_numpy() if timed.any() else np.zeros(len(frame), dtype=bool)
    starts = np.union1d([0], np.flatnonzero(resumed)).astype(int)
    step = step_numbers(frame)
    start_of = starts[np.searchsorted(starts, np.arange(len(frame)), side="right") - 1]
    return frame[step - step[start_of] >= warmup_steps(recipe)] if len(frame) else frame


def measure(settled: pd.DataFrame, recipe: Recipe | None) -> Signals:
    """The signals of steps that are past their warm-up (see `settled_steps`). Never raises on what a log may hold."""
    phases = _phases(settled, recipe)
    mean = _means(settled)
    samples = mean("batch/samples_per_step")
    if samples is None and recipe is not None and recipe.samples_per_step is not None:
        samples = float(recipe.samples_per_step)
    queue, full = mean("sample/rollout_queue_size"), full_queue_reading(samples, recipe)
    rollouts_logged = any(column(settled, n).notna().any() for n in map(str, settled) if n.startswith("rollout/"))
    fwd_bwd, wall_clock = mean("perf/mfu_fwd_bwd"), mean("perf/mfu_wall_clock")
    told = ("perf/fwd_bwd_s", "perf/rollout_wait_s", "sample/rollout_queue_size")
    return Signals(
        steps=int(pd.concat([column(settled, name).notna() for name in told], axis=1).any(axis=1).sum()),
        **phases,
        fwd_bwd_over_fwd=_ratio(mean("perf/fwd_bwd_s"), mean("perf/fwd_s")),
        weight_sync_s=mean("perf/weight_sync_s"),
        weight_sync_load_s=_load_s(mean),
        queue_size=queue,
        queue_maxsize=None if recipe is None else float(recipe.rollout.queue_maxsize),
        queue_full_reading=full,
        queue_fill=_ratio(queue, full),
        # TRL logs these two only when something was blocked, so their absence means something once rollouts are logged.
        blocked_steps=_logged_in(settled, "rollout/backpressure_s") if rollouts_logged else None,
        backpressure_s=mean("rollout/backpressure_s"),
        score_blocked_steps=_logged_in(settled, "rollout/score_block_s") if rollouts_logged else None,
        inflight=mean("rollout/inflight"),
        inflight_limit=None if recipe is None else float(recipe.inflight_limit),
        inflight_cap=mean("rollout/inflight_cap"),
        generated_tok_s=mean("rollout/generated_tok_s"),
        usable_tok_s=_usable_tok_s(settled, recipe, phases),
        mfu_fwd_bwd=fwd_bwd,
        mfu_wall_clock=wall_clock,
        mfu_ratio=_ratio(wall_clock, fwd_bwd),
        samples_per_step=samples,
        samples_per_row=mean("batch/samples_per_row"),
        row_tokens=mean("batch/row_tokens_mean"),
        sample_tokens=mean("sample/forwarded_tokens_mean"),
        staleness_mean=mean("sample/staleness_mean"),
        staleness_max=_finite(column(settled, "sample/staleness_max").max()),
        dropped_per_trained=_dropped(settled, samples),
    )


def _load_s(mean: Callable[[str], float | None]) -> float | None:
    """TRL times pause, barrier and save (`transfer`) of an adapter sync; load and resume are the rest."""
    parts = [mean(f"perf/weight_sync_{part}s") for part in ("", "pause_", "barrier_", "transfer_")]
    known = [part for part in parts if part is not None]
    return known[0] - sum(known[1:]) if len(known) == len(parts) else None


def full_queue_reading(samples_per_step: float | None, recipe: Recipe | None) -> float | None:
    """What sample/rollout_queue_size reads when the queue is always refilled, in samples; None when nobody can say.

    TRL reads the queue after each sample it takes and averages over the step: from queue_maxsize down by one step's
    samples, so half a step's below the size. A step larger than the queue drains it whatever generation does. With an
    unknown step the size itself is taken, which makes the queue look a little emptier than it is.
    """
    if recipe is None:
        return None
    size = float(recipe.rollout.queue_maxsize)
    if samples_per_step is None:
        return size
    return size - samples_per_step / 2 if samples_per_step <= size else None


def column(frame: pd.DataFrame, name: str) -> pd.Series[float]:
    """A metric as floats, NaN where it is absent or cannot be: every metric here is a size between 0 and LARGEST."""
    if name not in frame:
        return pd.Series(np.nan, index=frame.index, dtype="float64")
    values = frame[name]
    if isinstance(values, pd.DataFrame):  # the name twice: the last one, as everywhere
        values = values.iloc[:, -1]
    numbers = pd.to_numeric(values, errors="coerce").astype("float64")
    return numbers.where(numbers.between(0, LARGEST))


def step_numbers(frame: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Global step of every row; the row's position where the index is something else."""
    try:
        steps = np.asarray(frame.index, dtype="float64")
    except (TypeError, ValueError):
        steps = np.array([np.nan] * len(frame))
    return (
        steps if np.all(np.diff(steps) > 0) and np.all(np.isfinite(steps)) else np.arange(len(frame), dtype="float64")
    )


def _phases(settled: pd.DataFrame, recipe: Recipe | None) -> dict[str, Any]:
    """Seconds and fractions of the step, over the steps that have all of perf/step_s, fwd_bwd and the rollout wait.

    Where perf/step_s was never logged, the phases that were are a lower bound of the step, and give upper bounds of
    their fractions.
    """
    step, fwd_bwd, wait = (column(settled, f"perf/{name}_s") for name in ("step", "fwd_bwd", "rollout_wait"))
    timed = step.notna() & fwd_bwd.notna() & wait.notna()
    rows = settled[timed] if timed.any() else settled
    mean = _means(rows)
    step_s = mean("perf/step_s")
    fwd_bwd_s, wait_s, optimizer_s = mean("perf/fwd_bwd_s"), mean("perf/rollout_wait_s"), mean("perf/optimizer_s")
    sync_s = _sync_per_step(rows, recipe)
    known = sum(s for s in (fwd_bwd_s, wait_s, sync_s, optimizer_s) if s is not None)
    excess = _ratio(known, step_s)
    shares: dict[str, float] = {}
    if step_s and fwd_bwd_s is not None and wait_s is not None and excess is not None and excess <= TIMER_SLACK:
        whole = max(step_s, known)
        parts = {"forward_backward": fwd_bwd_s, "rollout_wait": wait_s, "weight_sync": sync_s, "optimizer": optimizer_s}
        shares = {name: (seconds or 0.0) / whole for name, seconds in parts.items()}
        shares["other"] = max(0.0, step_s - known) / whole
    whole = max(step_s or 0.0, known)
    # Against the forward+backward time alone a wait says nothing when that is all there is.
    whole_known = step_s is not None or fwd_bwd_s is not None
    return {
        "shares": shares,
        "step_s": step_s,
        "fwd_bwd_s": fwd_bwd_s,
        "rollout_wait_s": wait_s,
        "wait_share": _ratio(wait_s, whole) if whole_known else None,
        "weight_sync_per_step_s": sync_s,
        "sync_share": _ratio(sync_s, whole) if whole_known else None,
        "phases_over_step": excess,
    }


def _sync_per_step(rows: pd.DataFrame, recipe: Recipe | None) -> float | None:
    """Seconds of weight sync per step. A log with a row for every step says how often; otherwise the recipe does."""
    syncs = column(rows, "perf/weight_sync_s")
    if _interval(rows) == 1 and "perf/weight_sync_s" in rows:
        return _finite(syncs.sum() / len(rows)) if len(rows) else None
    return None if recipe is None else _ratio(_finite(syncs.mean()), recipe.rollout.weight_sync_steps)


def _interval(rows: pd.DataFrame) -> float:
    """Steps between two rows of the log (TRL's logging_steps)."""
    gaps = np.diff(step_numbers(rows))
    return float(np.median(gaps)) if len(gaps) else 1.0


def _usable_tok_s(settled: pd.DataFrame, recipe: Recipe | None, phases: dict[str, Any]) -> float | None:
    mean = _means(settled)
    tokens = mean("batch/forwarded_tokens_per_step")
    if tokens is None and recipe is not None and recipe.train.token_budget != 0:
        row = recipe.train.token_budget or recipe.serve.max_model_len  # None: TRL takes the server's context length
        tokens = float(row * recipe.train.gradient_accumulation_steps * recipe.train.processes)
    if phases["fwd_bwd_s"] is None:
        return None
    busy = (phases["fwd_bwd_s"], phases["weight_sync_per_step_s"], mean("perf/optimizer_s"))
    return _ratio(tokens, sum(s for s in busy if s is not None))


def _dropped(settled: pd.DataFrame, samples_per_step: float | None) -> float | None:
    if samples_per_step is None or not column(settled, "sample/staleness_mean").notna().any():
        return None
    trained = samples_per_step * _interval(settled) * len(settled)
    return _ratio(float(column(settled, "sample/dropped_stale_total").sum()), trained)


def _logged_in(settled: pd.DataFrame, name: str) -> float | None:
    return float(column(settled, name).notna().mean()) if len(settled) else None


def _means(rows: pd.DataFrame) -> Callable[[str], float | None]:
    return lambda name: _finite(column(rows, name).mean())


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else _finite(above / below)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
