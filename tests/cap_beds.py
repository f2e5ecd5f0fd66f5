"""Five simulated test beds for the admission cap, and what a run on one of them came to.

All are the published experiment (two engines of 8 GiB of KV cache, answers of up to 8,192 tokens, 512 rollouts in
flight at most, the cache kept at a sync) with one thing changed. Where generation can outrun the trainer (a larger
cache, short answers), 512 in flight are five steps' samples, and with a sync at every step some are too old whatever
is done at the servers; there the policy is synced every fourth step, and the queue holds four steps, as in the
five-run chase.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from rlkit.admission.law import Policy
from rlkit.recipe import load_recipe
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.setup import Pauses, Setup
from rlkit.simulation.simulate import Simulation, simulate

RECIPE = Path(__file__).parents[1] / "runs" / "adaptive-cap" / "kv8g-cap.yaml"
CEILING = 512

# The part of a run before which a law is still on its way from its start.
SETTLED_AFTER = 0.25


def published(steps: int) -> Setup:
    """The published experiment's first steps; its answers become shorter over all of its 300."""
    return replace(setup_of(load_recipe(RECIPE)), cap="none", max_inflight=CEILING, stop_after=steps)


def cache_of_four_times_the_size(steps: int) -> Setup:
    """32 GiB an engine: 512 rollouts hardly fill it, and the trainer is the bottleneck."""
    setup = _with_caches(published(steps), 4.0)
    return replace(setup, sync=replace(setup.sync, interval=4), queue_maxsize=CEILING)


def lengths_that_double(steps: int) -> Setup:
    """From 3,120 tokens on average to the 6,240 that the experiment began with."""
    setup = published(steps)
    lengths = replace(setup.lengths, mean_start=3120.0, mean_end=6240.0)
    return replace(setup, steps=steps, lengths=lengths, sync=replace(setup.sync, interval=4), queue_maxsize=CEILING)


def unequal_replicas(steps: int) -> Setup:
    """Two servers, the second with half of the first one's cache; requests are spread evenly."""
    setup = _with_caches(published(steps), 1.0, 0.5)
    return replace(setup, engines=tuple(replace(engine, server=n) for n, engine in enumerate(setup.engines)))


def bursty_pauses(steps: int) -> Setup:
    """All servers stop for ten seconds every thirty."""
    return replace(published(steps), pauses=Pauses(every_s=30.0, seconds=10.0))


def cache_that_never_fills(steps: int) -> Setup:
    """128 GiB an engine: 512 rollouts use a seventh of it."""
    return _with_caches(cache_of_four_times_the_size(steps), 4.0)


BEDS: dict[str, Callable[[int], Setup]] = {
    "published": published,
    "cache x4": cache_of_four_times_the_size,
    "doubling": lengths_that_double,
    "unequal": unequal_replicas,
    "bursty": bursty_pauses,
}


def _with_caches(setup: Setup, *factors: float) -> Setup:
    """Other caches: one factor for every engine, or one for all."""
    engines = tuple(
        replace(engine, capacity=replace(engine.capacity, kv_tokens=factor * engine.capacity.kv_tokens))
        for engine, factor in zip(setup.engines, factors if len(factors) > 1 else cycle(factors), strict=False)
    )
    return replace(setup, engines=engines)


@dataclass(frozen=True)
class Outcome:
    """One run, or the mean of several. `preempted` is preemptions over requests; caps and usage once it has settled.

    A run without a law has the cap it was given, and the usage that a law would have read.
    """

    useful_tok_s: float
    preempted: float
    dropped: float
    staleness: float
    cap_min: float
    cap_mean: float
    cap_max: float
    usage_mean: float
    usage_min: float
    usage_max: float


def simulated(bed: Callable[[int], Setup], policy: Policy, limit: int, seed: int, steps: int) -> Simulation:
    """One run with at most `limit` in flight."""
    return simulate(replace(bed(steps), cap=policy, max_inflight=limit), seed=seed)


def run(bed: str, policy: Policy, limit: int, seed: int, steps: int) -> Outcome:
    """What one run with at most `limit` in flight comes to."""
    run = simulated(BEDS[bed], policy, limit, seed, steps)
    settled = run.decisions[int(SETTLED_AFTER * len(run.decisions)) :]
    caps = [decision.cap for decision in settled]
    usages = [decision.usage for decision in settled if decision.usage is not None]
    return Outcome(
        useful_tok_s=run.useful_tok_s,
        preempted=run.preemptions / run.requests,
        dropped=run.dropped,
        staleness=statistics.fmean(step.metrics["sample/staleness_mean"] for step in run.steps),
        cap_min=min(caps),
        cap_mean=statistics.fmean(caps),
        cap_max=max(caps),
        usage_mean=statistics.fmean(usages),
        usage_min=min(usages),
        usage_max=max(usages),
    )
