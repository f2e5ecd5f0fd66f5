"""Both published experiments beside their simulation, cell by cell.

`compare` simulates the nine recipes with several seeds; `published.json` holds the figures, `rlkit.simulation.cells`
how each is measured. The recipes are those of `runs/published` and `runs/adaptive-cap`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rlkit import machine
from rlkit.diagnosis import diagnose
from rlkit.errors import BadInput
from rlkit.process_pool import process_pool
from rlkit.recipe import Recipe, load_recipe
from rlkit.simulation.cells import STATISTICS, TOLERANCES, TOLERANCES_OF_RUNS, SimulatedRun
from rlkit.simulation.constants import Physics
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate

RECIPES = Path(__file__).parents[2] / "runs"
FOLDERS = {"five_run_chase": "published", "adaptive_cap_2x2": "adaptive-cap"}


@dataclass(frozen=True)
class Cell:
    """One published figure beside its simulation. A range has two different ends; None: not simulated, or not judged.

    `error` is relative to the published value, or to the nearer end of its range, 0 inside of it.
    """

    run: str
    figure: str
    statistic: str
    published_low: float
    published_high: float
    simulated: float | None
    deviation: float | None  # over the seeds
    error: float | None
    tolerance: str | None
    within: bool | None


@dataclass(frozen=True)
class VerdictCell:
    """A published verdict beside the diagnosis of the simulated run."""

    run: str
    published: str
    simulated: list[str]  # one per seed
    cause: str | None
    within: bool


@dataclass(frozen=True)
class Comparison:
    """Every cell, every verdict, and the CPU seconds of one seed's chase and of the longest run."""

    cells: list[Cell]
    verdicts: list[VerdictCell]
    chase_cpu_s: float
    longest_run_cpu_s: float

    @property
    def misses(self) -> list[str]:
        """The cells and verdicts out of their tolerance."""
        cells = [f"{cell.run} {cell.figure}" for cell in self.cells if cell.within is False]
        return cells + [f"{verdict.run} verdict" for verdict in self.verdicts if not verdict.within]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON types."""
        return asdict(self) | {"misses": self.misses}


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its experiment, its figures, and after how many steps it ended (None: the recipe's).

    Its authors' verdict and cause, and what they changed next.
    """

    name: str
    experiment: str
    figures: dict[str, Any]
    verdict: str | None
    steps_run: int | None
    cause: str | None = None
    next_change: str | None = None

    @property
    def recipe(self) -> Recipe:
        """Its recipe. Raises BadInput when the recipes are not beside the package."""
        path = RECIPES / FOLDERS[self.experiment] / f"{self.name}.yaml"
        if not path.is_file():
            raise BadInput(f"{path}: the published recipes are not there; run this from a checkout of the project")
        return load_recipe(path)


def published_runs() -> list[PublishedRun]:
    """The nine runs of published.json."""
    data = json.loads(resources.files("rlkit.simulation").joinpath("published.json").read_text(encoding="utf-8"))
    return [
        PublishedRun(
            name=run["name"],
            experiment=experiment,
            figures=run["published"] | run.get("routing", {}),
            verdict=run.get("verdict"),
            steps_run=run.get("steps_run"),
            cause=run.get("cause"),
            next_change=run.get("next"),
        )
        for experiment in FOLDERS
        for run in data[experiment]["runs"]
    ]


def compare(
    seeds: int = 3,
    physics: Physics | None = None,
    processes: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, whole: None,
) -> Comparison:
    """Simulate all nine runs with seeds 0, 1, ... on this machine's cores; `on_done` gets how many of how many are."""
    runs = published_runs()
    jobs = [(run, seed, physics or Physics()) for run in runs for seed in range(seeds)]
    with process_pool(processes or machine.cores()) as pool:
        measured = []
        for one in pool.map(_measure, jobs):
            measured.append(one)
            on_done(len(measured), len(jobs))
    of_run = {run.name: measured[index * seeds : (index + 1) * seeds] for index, run in enumerate(runs)}
    chase = [one["cpu_s"] for run in runs if run.experiment == "five_run_chase" for one in of_run[run.name]]
    return Comparison(
        cells=[cell for run in runs for cell in _cells(run, [one["values"] for one in of_run[run.name]])],
        verdicts=[_verdict(run, of_run[run.name]) for run in runs if run.verdict is not None],
        chase_cpu_s=math.fsum(chase) / seeds,
        longest_run_cpu_s=max(one["cpu_s"] for one in measured),
    )


def _measure(job: tuple[PublishedRun, int, Physics]) -> dict[str, Any]:
    """One run with one seed: its cells' values (None: not simulated), its verdict, its CPU seconds."""
    import time

    run, seed, physics = job
    recipe = run.recipe
    began = time.process_time()
    simulated = simulate(replace(setup_of(recipe, physics), stop_after=run.steps_run), seed)
    seconds = time.process_time() - began
    seen = SimulatedRun(recipe, simulated)
    values = [
        None if statistic.measure is None else statistic.measure(seen)
        for figure in run.figures
        for statistic in STATISTICS[figure]
    ]
    verdict = diagnose(frame_of(simulated), recipe)
    return {"values": values, "verdict": verdict.bound, "cause": verdict.cause, "cpu_s": seconds}


def _cells(run: PublishedRun, seeds: Sequence[Sequence[float | None]]) -> Iterator[Cell]:
    position = 0
    for figure, published in run.figures.items():
        statistics_of = STATISTICS[figure]
        ends = sorted(published) if isinstance(published, list) else [published, published]
        for number, statistic in enumerate(statistics_of):
            one = len(statistics_of) == 1
            low, high = (ends[0], ends[-1]) if one else (ends[-number], ends[-number])
            name = figure if one else f"{figure} ({'lowest' if number == 0 else 'highest'})"
            drawn = [values[position] for values in seeds]
            position += 1
            yield _cell(run.name, figure, name, statistic.text, float(low), float(high), drawn)


def _cell(
    run: str, figure: str, name: str, statistic: str, low: float, high: float, drawn: Sequence[float | None]
) -> Cell:
    values = [value for value in drawn if value is not None]
    if not values:
        return Cell(run, name, statistic, low, high, None, None, None, None, None)
    mean = statistics.fmean(values)
    nearest = min(max(mean, low), high)
    tolerance = TOLERANCES_OF_RUNS.get((run, figure)) or TOLERANCES.get(figure)
    return Cell(
        run=run,
        figure=name,
        statistic=statistic,
        published_low=low,
        published_high=high,
        simulated=mean,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        error=(mean - nearest) / nearest if nearest else None,
        tolerance=None if tolerance is None else tolerance.text,
        within=None if tolerance is None else tolerance.allows(mean, low, high),
    )


def _verdict(run: PublishedRun, measured: Sequence[dict[str, Any]]) -> VerdictCell:
    bounds = [str(one["verdict"]) for one in measured]
    published = str(run.verdict)
    return VerdictCell(
        run.name, published, bounds, measured[0]["cause"], all(f"{bound}-bound" == published for bound in bounds)
    )
