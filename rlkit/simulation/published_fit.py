"""The fitted constants, fitted again to the published cells that each names: `rlkit calibrate --published`.

The runs are simulated with a part of their steps, the lengths changing over these as over all, and each figure is
corrected by what the whole run gave over the part at the start: the optimizer sees short runs, the result holds for
whole ones. Cells that are held out are taken away before anything is simulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlkit import machine
from rlkit.errors import BadInput
from rlkit.process_pool import process_pool
from rlkit.simulation.cells import STATISTICS, TOLERANCES, TOLERANCES_OF_RUNS, SimulatedRun
from rlkit.simulation.constants import (
    ADAPTIVE_CAP,
    CHASE,
    WORKLOAD_ORIGINS,
    Origin,
    Physics,
    Workload,
    physics_origins,
)
from rlkit.simulation.fitting import ROUNDS, fit
from rlkit.simulation.published import PublishedRun, published_runs
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate

# Steps of a run that the optimizer simulates: a fifth, and not so few that the warm-up is most of them.
PART = 0.2
FEWEST_STEPS = 16
# How near a cell without a relative tolerance is asked to come.
ELSE_WITHIN = 0.10
# A constant twice as large weighs as much as a cell a third of its tolerance away: it matters where no cell decides.
STIFFNESS = 0.5
# Added to counts on both sides, since a logarithm has no nought. Few of something are not met nearer than by chance.
ONE = 1.0
# More than a fit to one's own runs takes: a first step of seventeen constants goes too far and is halved a few times.
PUBLISHED_ROUNDS = 2 * ROUNDS


@dataclass(frozen=True)
class Constants:
    """Everything that can be fitted."""

    physics: Physics = field(default_factory=Physics)
    chase: Workload = CHASE
    cap: Workload = ADAPTIVE_CAP

    def workload(self, run: PublishedRun) -> Workload:
        """Of a run's experiment."""
        return self.chase if run.experiment == "five_run_chase" else self.cap

    def scaled(self, name: str, factor: float) -> Constants:
        """With one constant (an Origin's name) multiplied."""

        def times(workload: Workload, *fields: str) -> Workload:
            changes: dict[str, Any] = {one: getattr(workload, one) * factor for one in fields}
            return replace(workload, **changes)

        match name:
            case "CHASE.mean_start":
                return replace(self, chase=times(self.chase, "mean_start"))
            case "CHASE.mean_end":
                return replace(self, chase=times(self.chase, "mean_end"))
            case "ADAPTIVE_CAP.mean_start":
                return replace(self, cap=times(self.cap, "mean_start", "mean_end"))
            case "ADAPTIVE_CAP.trainer_factor":
                return replace(self, cap=times(self.cap, "trainer_factor"))
            case "WITHIN_PROMPT":
                return replace(self, chase=times(self.chase, "within_prompt"), cap=times(self.cap, "within_prompt"))
            case "BETWEEN_PROMPTS":
                return replace(self, chase=times(self.chase, "between_prompts"), cap=times(self.cap, "between_prompts"))
            case _:
                changes: dict[str, Any] = {name: getattr(self.physics, name) * factor}
                return replace(self, physics=replace(self.physics, **changes))


@dataclass(frozen=True)
class CellFit:
    """A cell, and what was simulated for it before and after. `fitted` says whether the fit saw it."""

    cell: str
    published: float
    before: float
    after: float
    fitted: bool

    @property
    def error(self) -> float:
        """After the fit, relative."""
        return self.after / self.published - 1 if self.published else math.nan


@dataclass(frozen=True)
class PublishedFit:
    """The constants found, each one's value before and after, and every cell's residual."""

    constants: Constants
    values: Mapping[str, tuple[float, float]]
    cells: tuple[CellFit, ...]
    simulations: int

    def save(self, path: Path) -> None:
        """Write it where `rlkit predict --constants` reads it."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain JSON types; `workloads` are by the model that wrote the completions."""
        models = {run.recipe.model.name: asdict(self.constants.workload(run)) for run in published_runs()}
        return {
            "physics": asdict(self.constants.physics),
            "workloads": models,
            "constants": {name: {"before": was, "after": now} for name, (was, now) in self.values.items()},
            "cells": [asdict(cell) | {"error": cell.error} for cell in self.cells],
        }


def fittable() -> list[Origin]:
    """The constants that are fitted, each with its cells."""
    return [origin for origin in (*physics_origins(Physics()), *WORKLOAD_ORIGINS) if origin.kind == "fitted"]


def fit_published(
    hold_out: Sequence[str] = (),
    only: Sequence[str] = (),
    runs: Sequence[PublishedRun] | None = None,
    part: float = PART,
    whole: float = 1.0,
    processes: int | None = None,
    on_simulated: Callable[[int, int], None] | None = None,
) -> PublishedFit:
    """Fit `only` these constants, or all, to their cells without those held out (`<run>:<figure>`, or a whole run).

    Raises BadInput for a name that there is not. `part` of the steps is simulated while fitting, `whole` before and
    after; `on_simulated` is told how many simulations are done and about how many there will be.
    """
    published = {run.name: run for run in (published_runs() if runs is None else runs)}
    origins = _chosen(only)
    held = _held_out(hold_out, published)
    named = {cell for origin in origins for cell in origin.cells}
    used = sorted(named - held)
    origins = [origin for origin in origins if set(origin.cells) & set(used)]
    if not origins:
        raise BadInput("--hold-out: nothing is left to fit to")
    shown = sorted(named | {cell for cell in held if _can_be_shown(cell, published)})
    needed = sorted({cell.partition(":")[0] for cell in shown})
    fitted_runs = [published[name] for name in sorted({cell.partition(":")[0] for cell in used})]
    planned = 2 * len(needed) + (len(origins) + 2 + PUBLISHED_ROUNDS) * len(fitted_runs)
    done = 0

    def changed(factors: Sequence[float]) -> Constants:
        found = Constants()
        for origin, factor in zip(origins, factors, strict=True):
            found = found.scaled(origin.name, factor)
        return found

    with ExitStack() as stack:
        workers = processes or machine.cores()
        pool = stack.enter_context(process_pool(workers)) if workers > 1 else None

        def figures(jobs: list[tuple[PublishedRun, Constants, float]]) -> list[dict[str, list[float]]]:
            nonlocal done
            found = []
            for values in map(_measure, jobs) if pool is None else pool.map(_measure, jobs):
                found.append(values)
                done += 1
                if on_simulated is not None:
                    on_simulated(done, max(planned, done))
            return found

        def of_all(constants: Constants, names: Sequence[str], share: float) -> dict[str, list[float]]:
            measured = figures([(published[name], constants, share) for name in names])
            return {cell: values for one in measured for cell, values in one.items()}

        before = of_all(Constants(), needed, whole)
        short = of_all(Constants(), [run.name for run in fitted_runs], part)
        correction = {cell: [_ratio(a, b) for a, b in zip(before[cell], short[cell], strict=True)] for cell in used}

        def residuals(points: list[list[float]]) -> list[list[float]]:
            jobs = [(run, changed(point), part) for point in points for run in fitted_runs]
            measured, size = figures(jobs), len(fitted_runs)
            found = []
            for number in range(len(points)):
                values = {k: v for one in measured[number * size : (number + 1) * size] for k, v in one.items()}
                found.append([r for cell in used for r in _residuals(cell, published, values[cell], correction[cell])])
            return found

        found = fit(len(origins), residuals, [STIFFNESS] * len(origins), PUBLISHED_ROUNDS)
        constants = changed(found.factors)
        after = of_all(constants, needed, whole)
    values = {origin.name: (origin.value, origin.value * f) for origin, f in zip(origins, found.factors, strict=True)}
    cells = [
        fitted for cell in shown for fitted in _cell_fits(cell, published, before[cell], after[cell], cell in used)
    ]
    return PublishedFit(constants, values, tuple(cells), done)


def _chosen(only: Sequence[str]) -> list[Origin]:
    origins = fittable()
    for name in only:
        if name not in [origin.name for origin in origins]:
            raise BadInput(f"--only {name}: no fitted constant; there are: {', '.join(one.name for one in origins)}")
    return [origin for origin in origins if not only or origin.name in only]


def _held_out(hold_out: Sequence[str], published: Mapping[str, PublishedRun]) -> set[str]:
    held: set[str] = set()
    for name in hold_out:
        run, _, figure = name.partition(":")
        if run not in published or (figure and figure not in published[run].figures):
            example = "r1-dp2:perf/fwd_bwd_s, or a whole run: r1-dp2"
            raise BadInput(f"--hold-out {name}: no published cell; say for example {example}")
        held |= {f"{run}:{one}" for one in ([figure] if figure else published[run].figures)}
    return held


def _can_be_shown(cell: str, published: Mapping[str, PublishedRun]) -> bool:
    run, _, figure = cell.partition(":")
    return figure in published[run].figures and all(one.measure is not None for one in STATISTICS[figure])


def _measure(job: tuple[PublishedRun, Constants, float]) -> dict[str, list[float]]:
    """Every figure of a run, as many values as it has statistics."""
    run, constants, share = job
    recipe = run.recipe
    setup = setup_of(recipe, constants.physics, constants.workload(run))

    def part_of(steps: int) -> int:
        return min(steps, max(FEWEST_STEPS, round(steps * share)))

    stop = None if run.steps_run is None else part_of(run.steps_run)
    seen = SimulatedRun(recipe, simulate(replace(setup, steps=part_of(setup.steps), stop_after=stop)))
    return {
        f"{run.name}:{figure}": [one.measure(seen) for one in STATISTICS[figure] if one.measure is not None]
        for figure in run.figures
    }


def _targets(cell: str, published: Mapping[str, PublishedRun], values: Sequence[float]) -> list[float]:
    """What each statistic should be; in a range that has one statistic, the nearest of it."""
    run, _, figure = cell.partition(":")
    wanted = published[run].figures[figure]
    ends = sorted(wanted) if isinstance(wanted, list) else [wanted, wanted]
    if len(values) == 1:
        return [min(max(values[0], float(ends[0])), float(ends[-1]))]
    return [float(ends[0]), float(ends[-1])]


def _residuals(
    cell: str, published: Mapping[str, PublishedRun], values: Sequence[float], correction: Sequence[float]
) -> list[float]:
    run, _, figure = cell.partition(":")
    tolerance = TOLERANCES_OF_RUNS.get((run, figure)) or TOLERANCES.get(figure)
    within = tolerance.bound if tolerance is not None and tolerance.kind == "relative" else ELSE_WITHIN
    whole = [value * factor for value, factor in zip(values, correction, strict=True)]
    counts = [one.text == "count" for one in STATISTICS[figure]]
    return [
        math.log(max(value + ONE, ONE) / (target + ONE)) / max(within, 1 / math.sqrt(target + ONE))
        if count
        else math.log(max(value, 1e-9) / target) / within
        for value, target, count in zip(whole, _targets(cell, published, whole), counts, strict=True)
    ]


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _cell_fits(
    cell: str, published: Mapping[str, PublishedRun], before: Sequence[float], after: Sequence[float], fitted: bool
) -> list[CellFit]:
    targets = _targets(cell, published, after)
    names = [cell] if len(after) == 1 else [f"{cell} (lowest)", f"{cell} (highest)"]
    return [CellFit(*one, fitted) for one in zip(names, targets, before, after, strict=True)]
