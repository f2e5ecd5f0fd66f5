"""The fastest and the cheapest ways to run a recipe: a grid of its changes, each simulated, and their Pareto front.

What changes learning stays as it is: staleness, the sync interval, the samples of a step (within what packing can
meet). Each candidate is simulated for `PLANNED_STEPS` steps over which its lengths change as over the whole run, and
the mean step times the recipe's steps is its wall-clock. Memory is not simulated: that a row without checkpointing fits
onto a GPU is for the reader to know.

Pruning: once the trainer of a shape never waits, more replicas, or more rollouts in flight on as many, buy nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rlkit import machine
from rlkit.counsel import Limits
from rlkit.diagnosis import diagnose
from rlkit.errors import BadInput
from rlkit.price import usd_per_hour
from rlkit.process_pool import process_pool
from rlkit.recipe import Recipe, recipe_diff
from rlkit.settling import warmup_steps
from rlkit.simulation.constants import Physics
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import translate
from rlkit.simulation.simulate import simulate
from rlkit.sizing import (
    Situation,
    generation,
    packed,
    packed_budget,
    samples_per_step,
    shorter_retry,
    tokens_per_sample,
)

# Enough steps for a mean that is known within a few percent, few enough for two hundred candidates in ten minutes.
PLANNED_STEPS = 100

# Replicas tried: from one up to this many more than the recipe has.
MORE_REPLICAS = 2

T = TypeVar("T")

# Rollouts in flight per replica; an engine gains little beyond, and the queue only gets older.
IN_FLIGHT_PER_REPLICA = (64, 128, 256)

# A trainer that waits for less than this part of a step gains nothing from faster generation.
NEVER_WAITS = 0.01


@dataclass(frozen=True)
class Point:
    """One candidate: what it changes, minutes and USD of the whole run, and what would bound it."""

    changes: tuple[str, ...]  # field=value, as --set takes them
    wall_clock_min: float
    usd: float | None
    usd_per_hour: float | None
    step_s: float
    staleness: float
    dropped_over_trained: float
    wait_share: float
    bound: str
    replicas: int
    in_flight: int


@dataclass(frozen=True)
class Plan:
    """The Pareto front of time and cost, fastest first, and the recipe as it is.

    Where nothing keeps to the budget and the deadline the front is empty, and `nearest` is the point that misses them
    by the least, as a part of each.
    """

    recipe: str
    as_it_is: Point
    front: tuple[Point, ...]
    simulated: int
    pruned: int
    extrapolated: tuple[str, ...]
    nearest: Point | None = None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        return asdict(self)


def plan(
    recipe: Recipe,
    budget_usd: float | None = None,
    deadline_min: float | None = None,
    sync_intervals: Sequence[int] = (),
    physics: Physics | None = None,
    processes: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, whole: None,
) -> Plan:
    """Search for the best ways to run a recipe; only points within the budget and the deadline are kept.

    `sync_intervals` are values of weight_sync_steps to try besides the recipe's, which changes what is learned.
    `on_done` gets how many of how many candidates are dealt with. Raises BadInput when a budget is given and the recipe
    does not say what an hour costs.
    """
    if budget_usd is not None and recipe.hardware.usd_per_hour is None:
        raise BadInput("hardware.usd_per_hour: not set, and a budget needs it")
    limits = Limits(deadline_min, budget_usd)
    translation = translate(recipe, physics)
    shapes = [list(shape) for shape in _shapes(recipe, sync_intervals)]
    tokens = tokens_per_sample(recipe)
    now = Situation(recipe, samples_per_step(recipe, tokens), tokens)
    points: list[Point] = []
    pruned = 0
    most_replicas = recipe.serve.replicas + MORE_REPLICAS
    whole = most_replicas * len(IN_FLIGHT_PER_REPLICA) * len(shapes)
    with process_pool(processes or machine.cores()) as pool:
        as_it_is = pool.submit(_simulate, (recipe, recipe, physics)).result()
        satisfied: set[int] = set()  # shapes whose trainer no longer waits
        for replicas in range(1, most_replicas + 1):
            for per_replica in IN_FLIGHT_PER_REPLICA:
                open_shapes = [number for number in range(len(shapes)) if number not in satisfied]
                pruned += len(shapes) - len(open_shapes)
                served = [f"serve.replicas={replicas}", *generation(now, replicas * per_replica)]
                candidates = [_candidate(recipe, [*served, *shapes[number]]) for number in open_shapes]
                jobs = [(recipe, candidate, physics) for candidate in candidates]
                found = []
                for point in pool.map(_simulate, jobs):
                    found.append(point)
                    on_done(len(points) + len(found) + pruned, whole)
                points += found
                satisfied |= {
                    number for number, point in zip(open_shapes, found, strict=True) if point.wait_share < NEVER_WAITS
                }
    excess = {point: limits.excess(point.wall_clock_min, point.usd) for point in (as_it_is, *points)}
    allowed = [point for point, much in excess.items() if much <= 1.0]
    front = tuple(sorted(_front(allowed), key=lambda point: point.wall_clock_min))
    nearest = None if front else min(excess, key=excess.__getitem__)
    return Plan(recipe.name, as_it_is, front, len(points) + 1, pruned, translation.extrapolated, nearest)


def _shapes(recipe: Recipe, sync_intervals: Sequence[int]) -> Iterator[list[str]]:
    """Changes of everything but replicas and what is in flight."""
    train, transport = recipe.train, recipe.transport
    packings: list[list[str]] = [[]]
    if train.token_budget == 0 and recipe.samples_per_step is not None:
        packings.append(packed(recipe, recipe.samples_per_step, tokens_per_sample(recipe), packed_budget(recipe)))
    checkpointing = [[]] if not train.gradient_checkpointing else [[], ["train.gradient_checkpointing=false"]]
    transports: list[list[str]] = [[]]
    if transport.kind == "bucket":
        retry_s = shorter_retry(recipe)
        if retry_s is not None:
            transports.append([f"transport.retry_s={retry_s}"])
        transports.append(["transport.kind=push"])
    caps: list[list[str]] = [[]] if recipe.cap.policy == "rlkit" else [[], ["cap.policy=rlkit"]]
    intervals: list[list[str]] = [[]]
    intervals += [[f"rollout.weight_sync_steps={n}"] for n in sync_intervals if n != recipe.rollout.weight_sync_steps]
    for parts in itertools.product(packings, checkpointing, transports, caps, intervals):
        yield [change for part in parts for change in part]


def _candidate(recipe: Recipe, changes: list[str]) -> Recipe:
    return recipe.with_overrides(changes)


def _simulate(job: tuple[Recipe, Recipe, Physics | None]) -> Point:
    original, recipe, physics = job
    setup = translate(recipe, physics).setup
    run = simulate(replace(setup, steps=min(PLANNED_STEPS, setup.steps)))
    steps = [step.metrics for step in run.steps[warmup_steps(recipe) :] or run.steps]
    verdict = diagnose(frame_of(run), recipe)
    step_s = statistics.fmean(step.get("perf/step_s", run.seconds) for step in steps)
    minutes = step_s * recipe.train.steps / 60
    rate = usd_per_hour(original, recipe)
    return Point(
        changes=tuple(f"{name}={value}" for name, _, value in recipe_diff(original, recipe)),
        wall_clock_min=minutes,
        usd=None if rate is None else minutes / 60 * rate,
        usd_per_hour=rate,
        step_s=step_s,
        staleness=statistics.fmean(step["sample/staleness_mean"] for step in steps),
        dropped_over_trained=run.dropped / run.trained_samples,
        wait_share=statistics.fmean(step["perf/rollout_wait_s"] for step in steps) / step_s,
        bound=verdict.bound,
        replicas=recipe.serve.replicas,
        in_flight=recipe.inflight_limit,
    )


def _front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in time and cost; without prices, the fastest for each number of replicas."""

    def cost(point: Point) -> float:
        return point.usd if point.usd is not None else float(point.replicas)

    simplest = sorted(points, key=lambda point: len(point.changes))
    return unbeaten(simplest, lambda point: (point.wall_clock_min, cost(point)))


def unbeaten(points: Iterable[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those that no other one beats in both figures that `of` gives, less being better; the least first of them first.

    Of equals in both, the first stays.
    """
    best, kept = math.inf, []
    for point in sorted(points, key=of):
        if of(point)[1] < best:
            best = of(point)[1]
            kept.append(point)
    return kept
