"""Constants for a user's own machine, read off the logs of real runs on it.

What has a metric of its own is its median over steps, or its mean. What does not, the trainer's rows and the engines'
iterations, slows each other down on shared cores and is fitted: the runs are simulated until forward and backward and
the time of a rollout take what they took. What a token of a row, or a sequence of an iteration, costs beyond the first
is fitted where the runs differ in it; one run alone scales what is assumed. What a run held out shows is never looked
at: it is for checking, with `rlkit predict --constants`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.signals import column, settled_steps
from rlkit.simulation.constants import Physics, Workload
from rlkit.simulation.fitting import fit
from rlkit.simulation.recipes import physics_of, setup_of, workload_of
from rlkit.simulation.simulate import simulate

# Rows, or engines, fuller than others by less than this part tell nothing of what one more token, or sequence, costs.
DISTINCT = 0.1

# What the fit meets, and how near: a percent or two is the noise of a mean.
FITTED_TO = ("perf/fwd_bwd_s", "rollout/duration_s")
WITHIN = 0.05
# What is assumed of the two costs of one more may well be wrong by a half; then it counts as much as a miss of WITHIN.
STIFFNESS = 2.0
# Steps that are simulated of a run: the rest of a long one says the same.
MOST_STEPS = 40
# A row of nothing but repetitions would close by what is trained on only.
MOST_SHARED = 0.95

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


def load_constants(path: Path, model: str = "") -> tuple[Physics, Workload | None]:
    """The constants in a file that rlkit calibrate wrote, and its lengths: of `model` where it has those of several.

    None where it has none of this model. Raises BadInput.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lengths = data["workload"] if "workload" in data else data["workloads"].get(model)
        return Physics(**data["physics"]), None if lengths is None else Workload(**lengths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
    workload = _workload(settled)
    physics = replace(assumed, **_medians(settled, assumed))
    physics = replace(physics, **_packing(settled, assumed), **_forward_share(settled, physics))
    physics = _fitted(settled, physics, workload)
    residuals = {run.name: _figures(run, physics, workload, JUDGED) for run in settled}
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
    }
    sync, barrier = median("perf/weight_sync_s"), median("perf/weight_sync_barrier_s") or 0.0
    if sync is not None and all(run.recipe.transport.kind == "merged" for run in runs):
        found["merged_sync_s"] = sync
    elif sync is not None:
        parts = (found["pause_s"] or 0.0) + (found["save_s"] or 0.0) + barrier
        # One attempt: on a machine whose folders are its own no mount lags.
        found |= {"load_s": max(0.0, sync - parts), "push_s": max(0.0, sync - parts), "lag_s": 0.0}
    return {name: value for name, value in found.items() if value is not None and hasattr(assumed, name)}


def _packing(runs: Sequence[LoggedRun], assumed: Physics) -> dict[str, Any]:
    """What is left of a step: so much a microbatch and so much a sample, as far as the runs tell them apart."""
    rows = []
    for run in runs:
        of = {name: column(run.frame, f"perf/{name}_s") for name in ("step", "fwd_bwd", "optimizer", "rollout_wait")}
        rest = of["step"] - of["fwd_bwd"] - of["optimizer"].fillna(0) - of["rollout_wait"]
        rest = rest - column(run.frame, "perf/weight_sync_s").fillna(0)
        samples, left = column(run.frame, "batch/samples_per_step").mean(), rest.median()
        if math.isfinite(left) and math.isfinite(samples):
            rows.append((float(run.recipe.train.gradient_accumulation_steps), float(samples), max(0.0, float(left))))
    if not rows:
        return {}
    microbatches, per_step, rest_s = np.asarray(rows).T
    if _differ(list(per_step / microbatches)):
        from scipy.optimize import nnls

        each, per_sample = (float(value) for value in nnls(np.stack([microbatches, per_step], axis=1), rest_s)[0])
    else:
        expected = assumed.microbatch_s * microbatches + assumed.sample_s * per_step
        scale = float(rest_s.sum() / expected.sum())
        each, per_sample = assumed.microbatch_s * scale, assumed.sample_s * scale
    return {"microbatch_s": each, "sample_s": per_sample}


def _forward_share(runs: Sequence[LoggedRun], physics: Physics) -> dict[str, Any]:
    forward: list[float] = []
    for run in runs:
        saved = 1.0 if run.recipe.train.gradient_checkpointing else 1 - physics.recompute_share
        forward += list((column(run.frame, "perf/fwd_s") / column(run.frame, "perf/fwd_bwd_s") * saved).dropna())
    return {"forward_share": statistics.median(forward)} if forward else {}


def _fitted(runs: Sequence[LoggedRun], physics: Physics, workload: Workload) -> Physics:
    """Seconds of a row and of an iteration, so that the simulated runs take what the logged ones did."""
    row_tokens = [_mean(run, "batch/row_tokens_mean") for run in runs]
    in_flight = [run.recipe.inflight_limit / run.recipe.serve.replicas for run in runs]
    scaled = [_scale_rows, _scale_iterations]
    scaled += [_scale_row_tokens] if _differ(row_tokens) else []
    scaled += [_scale_sequences] if _differ(in_flight) else []
    loose = 2  # what one run alone tells

    def changed(factors: Sequence[float]) -> Physics:
        found = physics
        for scale, factor in zip(scaled, factors, strict=True):
            found = scale(found, factor)
        return found

    def residuals(points: list[list[float]]) -> list[list[float]]:
        return [
            [
                math.log(simulated / logged) / WITHIN
                for run in runs
                for simulated, logged in _figures(run, changed(point), workload, FITTED_TO).values()
                if simulated > 0 and logged > 0
            ]
            for point in points
        ]

    stiffness = [0.0] * loose + [STIFFNESS] * (len(scaled) - loose)
    return changed(fit(len(scaled), residuals, stiffness).factors)


def _differ(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value]
    return len(known) > 1 and max(known) > min(known) * (1 + DISTINCT)


def _scale_rows(physics: Physics, factor: float) -> Physics:
    return replace(physics, row_s=physics.row_s * factor, row_mfu=physics.row_mfu / factor)


def _scale_row_tokens(physics: Physics, factor: float) -> Physics:
    return replace(physics, row_mfu=physics.row_mfu / factor)


def _scale_iterations(physics: Physics, factor: float) -> Physics:
    return replace(physics, iteration_s=physics.iteration_s * factor, sequence_s=physics.sequence_s * factor)


def _scale_sequences(physics: Physics, factor: float) -> Physics:
    return replace(physics, sequence_s=physics.sequence_s * factor)


def _workload(runs: Sequence[LoggedRun]) -> Workload:
    """Lengths: the completions of the first and the last quarter of the longest run, extended to its ends."""
    longest = max(runs, key=lambda run: len(run.frame))
    assumed = workload_of(longest.recipe)
    forwarded, trained = _mean(longest, "sample/forwarded_tokens_mean"), _mean(longest, "sample/trained_tokens_mean")
    prompt_tokens = assumed.prompt_tokens
    if forwarded is not None and trained is not None:
        prompt_tokens = max(1, round(forwarded - trained))
    template_tokens = min(assumed.template_tokens, prompt_tokens)
    found = replace(assumed, prompt_tokens=prompt_tokens, template_tokens=template_tokens)
    lengths = column(longest.frame, "completions/mean_length").dropna()
    if not lengths.empty:
        quarter = max(1, len(lengths) // 4)
        first, last = lengths.iloc[:quarter], lengths.iloc[-quarter:]
        start, end = float(first.mean()), float(last.mean())
        between = float(np.mean(last.index) - np.mean(first.index))
        slope = (end - start) / between if between > 0 else 0.0
        steps = longest.recipe.train.steps
        mean_start = max(1.0, start - slope * float(np.mean(first.index)))
        mean_end = max(1.0, end + slope * (steps - float(np.mean(last.index))))
        found = replace(found, mean_start=mean_start, mean_end=mean_end, over_steps=steps)
    shares = [share for run in runs if (share := _shared_completion(run, found)) is not None]
    return replace(
        found,
        folds_prompts=bool(shares) or found.folds_prompts,
        shared_completion=statistics.fmean(shares) if shares else found.shared_completion,
    )


def _shared_completion(run: LoggedRun, workload: Workload) -> float | None:
    """The part of a completion that its row has already, where rows are trees and hold whole groups."""
    ratio, each = column(run.frame, "batch/packing_ratio").dropna(), run.recipe.sampling.num_generations
    samples, tokens = _mean(run, "batch/samples_per_row"), _mean(run, "batch/row_tokens_mean")
    length = _mean(run, "sample/trained_tokens_mean")
    if ratio.empty or not (samples and tokens and length) or samples < each or each < 2:
        return None
    prompts = workload.template_tokens + samples / each * (workload.prompt_tokens - workload.template_tokens)
    new = (tokens - prompts) / (samples * length)  # the first of a group is all new
    return min(MOST_SHARED, max(0.0, (1 - new) * each / (each - 1)))


def _figures(
    run: LoggedRun, physics: Physics, workload: Workload, names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """(simulated, logged) means of figures over the same steps, as many as are simulated."""
    last = min(run.recipe.train.steps, int(run.frame.index.max()), MOST_STEPS)
    simulated = simulate(replace(setup_of(run.recipe, physics, workload), stop_after=last))
    frame = run.frame[run.frame.index <= last]
    steps = [step.metrics for step in simulated.steps if step.number >= frame.index.min()]
    found = {}
    for name in names:
        logged, values = column(frame, name).mean(), [step[name] for step in steps if name in step]
        if math.isfinite(logged) and values:
            found[name] = (statistics.fmean(values), float(logged))
    return found


def _mean(run: LoggedRun, name: str) -> float | None:
    value = float(column(run.frame, name).mean())
    return value if math.isfinite(value) else None
