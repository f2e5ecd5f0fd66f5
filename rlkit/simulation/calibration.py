"""Constants for a user's own machine, read off the logs of real runs on it.

Each one has its own metric, so nothing is searched for: the trainer's rows by least squares over steps of different
length, the iteration by least squares over runs with different numbers in flight (one run alone only scales what is
assumed), everything else as a median over steps. What a run held out shows is never looked at: it is for checking, with
`rlkit predict --constants`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.signals import column, settled_steps
from rlkit.simulation.constants import Physics, Workload
from rlkit.simulation.recipes import machine_of, physics_of, setup_of, workload_of
from rlkit.simulation.simulate import simulate

# Rows shorter or longer than each other by less than this part tell nothing of what a token costs.
DISTINCT = 0.1

# What a calibration is judged by: the figures it did not read directly.
JUDGED = ("perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "rollout/duration_s", "sample/rollout_queue_size")


@dataclass(frozen=True)
class Calibration:
    """Constants and lengths of a machine, the runs they came from, and (simulated, logged) of each judged figure."""

    physics: Physics
    workload: Workload
    runs: tuple[str, ...]
    residuals: Mapping[str, Mapping[str, tuple[float, float]]]

    def save(self, path: Path) -> None:
        """Write it where `rlkit predict --constants` reads it."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The calibration as plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class LoggedRun:
    """A real run: its name, its frame as `rlkit.tracking` reads it, its recipe."""

    name: str
    frame: pd.DataFrame
    recipe: Recipe


def load_constants(path: Path) -> tuple[Physics, Workload]:
    """The constants and lengths in a file that `Calibration.save` wrote. Raises BadInput."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Physics(**data["physics"]), Workload(**data["workload"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a file of constants that rlkit calibrate wrote ({error})") from None


def calibrate(runs: Sequence[LoggedRun]) -> Calibration:
    """Constants of the machine that `runs` were made on. Raises BadInput when they log too little."""
    if not runs:
        raise BadInput("calibrate: name at least one run")
    assumed = physics_of(runs[0].recipe)
    settled = [LoggedRun(run.name, settled_steps(run.frame, run.recipe), run.recipe) for run in runs]
    for run in settled:
        missing = [name for name in ("perf/fwd_bwd_s", "rollout/duration_s") if column(run.frame, name).isna().all()]
        if missing:
            raise BadInput(f"run {run.name!r}: no {' and no '.join(missing)} after its warm-up to calibrate by")
    physics = replace(assumed, **_medians(settled, assumed))
    physics = replace(physics, **_rows(settled, physics))
    physics = replace(physics, **_iteration(settled, physics))
    workload = _workload(settled)
    residuals = {run.name: _residuals(run, physics, workload) for run in settled}
    return Calibration(physics, workload, tuple(run.name for run in runs), residuals)


def _medians(runs: Sequence[LoggedRun], assumed: Physics) -> dict[str, Any]:
    def median(name: str) -> float | None:
        values = [float(value) for run in runs for value in column(run.frame, name).dropna()]
        return statistics.median(values) if values else None

    found = {
        "optimizer_s": median("perf/optimizer_s"),
        "score_s": median("rollout/score_s"),
        "pause_s": median("perf/weight_sync_pause_s"),
        "save_s": median("perf/weight_sync_transfer_s"),
        "microbatch_s": _microbatch_s(runs),
    }
    sync, barrier = median("perf/weight_sync_s"), median("perf/weight_sync_barrier_s") or 0.0
    if sync is not None and all(run.recipe.transport.kind == "merged" for run in runs):
        found["merged_sync_s"] = sync
    elif sync is not None:
        parts = (found["pause_s"] or 0.0) + (found["save_s"] or 0.0) + barrier
        # One attempt: on a machine whose folders are its own no mount lags.
        found |= {"load_s": max(0.0, sync - parts), "push_s": max(0.0, sync - parts), "lag_s": 0.0}
    return {name: value for name, value in found.items() if value is not None and hasattr(assumed, name)}


def _microbatch_s(runs: Sequence[LoggedRun]) -> float | None:
    """What is left of a step, per microbatch."""
    left = []
    for run in runs:
        of = {name: column(run.frame, f"perf/{name}_s") for name in ("step", "fwd_bwd", "optimizer", "rollout_wait")}
        rest = of["step"] - of["fwd_bwd"] - of["optimizer"].fillna(0) - of["rollout_wait"]
        rest = rest - column(run.frame, "perf/weight_sync_s").fillna(0)
        left += list((rest / run.recipe.train.gradient_accumulation_steps).dropna())
    return max(0.0, statistics.median(left)) if left else None


def _rows(runs: Sequence[LoggedRun], physics: Physics) -> dict[str, Any]:
    """Seconds of a row: row_s + row_token_s * tokens, both with gradient checkpointing."""
    tokens, seconds, forward = [], [], []
    for run in runs:
        saved = 1.0 if run.recipe.train.gradient_checkpointing else 1 - physics.recompute_share
        length = column(run.frame, "batch/row_tokens_mean")
        took = column(run.frame, "perf/fwd_bwd_s") / run.recipe.train.gradient_accumulation_steps / saved
        known = length.notna() & took.notna()
        tokens += list(length[known])
        seconds += list(took[known])
        forward += list((column(run.frame, "perf/fwd_s") / column(run.frame, "perf/fwd_bwd_s") * saved).dropna())
    machine = machine_of(runs[0].recipe)
    found = {"forward_share": statistics.median(forward)} if forward else {}
    if not tokens:
        return found
    row_s, token_s = physics.row_s, machine.row_token_s(physics)
    if max(tokens) > min(tokens) * (1 + DISTINCT):
        design = np.stack([np.ones(len(tokens)), np.asarray(tokens)], axis=1)
        row_s, token_s = (float(value) for value in np.linalg.lstsq(design, np.asarray(seconds), rcond=None)[0])
    if row_s <= 0 or token_s <= 0 or not max(tokens) > min(tokens) * (1 + DISTINCT):
        # The steps do not tell the two apart: their ratio stays as it was assumed.
        assumed = [physics.row_s + machine.row_token_s(physics) * length for length in tokens]
        scale = math.fsum(seconds) / math.fsum(assumed)
        row_s, token_s = physics.row_s * scale, machine.row_token_s(physics) * scale
    return found | {"row_s": row_s, "row_mfu": physics.row_mfu * machine.row_token_s(physics) / token_s}


def _iteration(runs: Sequence[LoggedRun], physics: Physics) -> dict[str, Any]:
    """Seconds of an iteration: base + per sequence * sequences that run on an engine, by Little's law."""
    running, seconds = [], []
    for run in runs:
        length, took = _mean(run, "completions/mean_length"), _mean(run, "rollout/duration_s")
        rate = _mean(run, "rollout/generated_tok_s")
        if not (length and took and rate):
            continue
        engines = run.recipe.serve.replicas * run.recipe.serve.data_parallel_size
        running.append(rate * took / length / engines)
        seconds.append(took * _generating(run) / length)
    if not running:
        return {}
    rates = machine_of(runs[0].recipe).rates(physics, runs[0].recipe.lora is not None)
    fixed = rates.base_s - physics.iteration_s
    base, each = rates.base_s, rates.sequence_s
    if len(running) > 1 and max(running) > min(running) * (1 + DISTINCT):
        design = np.stack([np.ones(len(running)), np.asarray(running)], axis=1)
        base, each = (float(value) for value in np.linalg.lstsq(design, np.asarray(seconds), rcond=None)[0])
    if base <= fixed or each <= 0 or len(running) == 1:
        scale = math.fsum(seconds) / math.fsum(rates.base_s + rates.sequence_s * count for count in running)
        base, each = rates.base_s * scale, rates.sequence_s * scale
    return {"iteration_s": max(0.0, base - fixed), "sequence_s": each}


def _generating(run: LoggedRun) -> float:
    """Part of the time in which the engines' clocks run: a weight sync stops them."""
    syncs, steps = column(run.frame, "perf/weight_sync_s").sum(), column(run.frame, "perf/step_s").sum()
    return 1.0 - float(min(0.9, syncs / steps)) if steps > 0 else 1.0


def _workload(runs: Sequence[LoggedRun]) -> Workload:
    """Lengths: the completions of the first and the last quarter of the first run, extended to its ends."""
    first = runs[0]
    assumed = workload_of(first.recipe)
    lengths = column(first.frame, "completions/mean_length").dropna()
    prompt = _mean(first, "sample/forwarded_tokens_mean"), _mean(first, "sample/trained_tokens_mean")
    prompt_tokens = assumed.prompt_tokens if None in prompt else round((prompt[0] or 0.0) - (prompt[1] or 0.0))
    if lengths.empty:
        return replace(assumed, prompt_tokens=prompt_tokens)
    quarter = max(1, len(lengths) // 4)
    return replace(
        assumed,
        mean_start=float(lengths.iloc[:quarter].mean()),
        mean_end=float(lengths.iloc[-quarter:].mean()),
        prompt_tokens=max(1, prompt_tokens),
        template_tokens=min(assumed.template_tokens, max(1, prompt_tokens)),
    )


def _residuals(run: LoggedRun, physics: Physics, workload: Workload) -> dict[str, tuple[float, float]]:
    simulated = simulate(setup_of(run.recipe, physics, workload))
    steps = [step.metrics for step in simulated.steps[len(simulated.steps) // 5 :]]
    found = {}
    for name in JUDGED:
        logged, values = _mean(run, name), [step[name] for step in steps if name in step]
        if logged is not None and values:
            found[name] = (statistics.fmean(values), logged)
    return found


def _mean(run: LoggedRun, name: str) -> float | None:
    value = float(column(run.frame, name).mean())
    return value if math.isfinite(value) else None


def changed(physics: Physics, assumed: Physics) -> dict[str, tuple[float, float]]:
    """The constants that a calibration changed: (assumed, calibrated)."""
    pairs = {item.name: (getattr(assumed, item.name), getattr(physics, item.name)) for item in fields(Physics)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
