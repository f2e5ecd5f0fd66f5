"""What a recipe would do and cost, before money is spent: a few seeds of its simulation, summed up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlkit import machine
from rlkit.diagnosis import Verdict, diagnose
from rlkit.process_pool import process_pool
from rlkit.recipe import Recipe
from rlkit.settling import warmup_steps
from rlkit.simulation.constants import Physics, Workload
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import translate
from rlkit.simulation.simulate import simulate


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """A recipe's run as simulated. Seconds and minutes of the run, USD when the recipe says what an hour costs."""

    recipe: str
    seeds: int
    steps: int
    step_s: Spread
    wall_clock_min: Spread
    usd: Spread | None
    staleness: Spread
    dropped_over_trained: Spread
    preemptions_per_request: Spread
    useful_tok_s: Spread
    bounds: list[str]  # one per seed
    verdict: Verdict  # of the first seed
    extrapolated: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain JSON types."""
        return asdict(self) | {"verdict": self.verdict.model_dump(mode="json")}


@dataclass(frozen=True)
class _Seed:
    step_s: float
    seconds: float
    staleness: float
    dropped: float
    preempted: float
    useful_tok_s: float
    steps: int
    verdict: Verdict


def predict(
    recipe: Recipe,
    seeds: int = 3,
    physics: Physics | None = None,
    workload: Workload | None = None,
    processes: int | None = None,
) -> Prediction:
    """Simulate a recipe with seeds 0, 1, ...; raises BadInput for what cannot be simulated.

    Seeds run on this machine's cores, or one after the other with `processes=1`.
    """
    translation = translate(recipe, physics, workload)
    jobs = [(recipe, physics, workload, seed) for seed in range(seeds)]
    workers = min(processes or machine.cores(), seeds)
    if workers == 1:
        runs: list[_Seed] = [_simulate(job) for job in jobs]
    else:
        with process_pool(workers) as pool:
            runs = list(pool.map(_simulate, jobs))
    rate = recipe.hardware.usd_per_hour
    return Prediction(
        recipe=recipe.name,
        seeds=seeds,
        steps=runs[0].steps,
        step_s=_spread(run.step_s for run in runs),
        wall_clock_min=_spread(run.seconds / 60 for run in runs),
        usd=None if rate is None else _spread(run.seconds / 3600 * rate for run in runs),
        staleness=_spread(run.staleness for run in runs),
        dropped_over_trained=_spread(run.dropped for run in runs),
        preemptions_per_request=_spread(run.preempted for run in runs),
        useful_tok_s=_spread(run.useful_tok_s for run in runs),
        bounds=[run.verdict.bound for run in runs],
        verdict=runs[0].verdict,
        extrapolated=translation.extrapolated,
    )


def _simulate(job: tuple[Recipe, Physics | None, Workload | None, int]) -> _Seed:
    recipe, physics, workload, seed = job
    run = simulate(translate(recipe, physics, workload).setup, seed)
    steps = run.steps[warmup_steps(recipe) :] or run.steps

    def mean(metric: str, never: float = 0.0) -> float:
        return statistics.fmean([step.metrics[metric] for step in steps if metric in step.metrics] or [never])

    return _Seed(
        step_s=mean("perf/step_s", run.seconds / len(run.steps)),  # the first step logs none
        seconds=run.seconds,
        staleness=mean("sample/staleness_mean"),
        dropped=run.dropped / run.trained_samples,
        preempted=run.preemptions / run.requests,
        useful_tok_s=run.useful_tok_s,
        steps=len(run.steps),
        verdict=diagnose(frame_of(run), recipe),
    )


def _spread(values: Iterable[float]) -> Spread:
    drawn: Sequence[float] = list(values)
    return Spread(statistics.fmean(drawn), min(drawn), max(drawn))
