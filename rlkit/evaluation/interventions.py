"""What bounds a run, by experiment: make one resource 10 % faster, and see how much more it trains on in a second.

The side with the largest gain is the truth about the side, the part of it with the largest gain is the truth about the
cause. Nothing else defines either. Two runs that are compared draw the same lengths and have the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from rlkit.evaluation.scenarios import Scenario
from rlkit.simulation.frame import frame_of
from rlkit.simulation.setup import Engine, Setup
from rlkit.simulation.simulate import Simulation, simulate

FASTER = 1.1

# The first steps of a run are its filling up; the verdict sets as many aside.
FIRST_STEPS = 40

# Below this gain nothing in particular bounds the run.
LEAST_GAIN = 0.02

Change = Callable[[Setup], Setup]


def faster_trainer(setup: Setup) -> Setup:
    """Everything the trainer does itself."""
    trainer = setup.trainer
    return replace(
        setup,
        trainer=replace(
            trainer,
            row_s=trainer.row_s / FASTER,
            row_token_s=trainer.row_token_s / FASTER,
            optimizer_s=trainer.optimizer_s / FASTER,
            microbatch_s=trainer.microbatch_s / FASTER,
            fetch_s=trainer.fetch_s / FASTER,
            sample_s=trainer.sample_s / FASTER,
        ),
    )


def cheaper_rows(setup: Setup) -> Setup:
    """What a row or a microbatch costs whatever is in it."""
    trainer = setup.trainer
    changed = replace(trainer, row_s=trainer.row_s / FASTER, microbatch_s=trainer.microbatch_s / FASTER)
    return replace(setup, trainer=changed)


def cheaper_tokens(setup: Setup) -> Setup:
    """What a token of a row costs."""
    return replace(setup, trainer=replace(setup.trainer, row_token_s=setup.trainer.row_token_s / FASTER))


def faster_generation(setup: Setup) -> Setup:
    """Every iteration and every prefill, and the cache that there is."""
    return replace(setup, engines=tuple(_faster(engine, whole=True) for engine in setup.engines))


def more_replicas(setup: Setup) -> Setup:
    """A tenth more replicas' compute for the same rollouts: fewer sequences each, the same fixed time."""
    return replace(setup, engines=tuple(_faster(engine, whole=False) for engine in setup.engines))


def more_in_flight(setup: Setup) -> Setup:
    """A tenth more rollouts at once."""
    return replace(setup, max_inflight=max(setup.max_inflight + 1, round(setup.max_inflight * FASTER)))


def more_cache(setup: Setup) -> Setup:
    """A tenth more KV cache for the same rollouts."""
    engines = tuple(
        replace(engine, capacity=replace(engine.capacity, kv_tokens=engine.capacity.kv_tokens * FASTER))
        for engine in setup.engines
    )
    return replace(setup, engines=engines)


def fewer_in_flight(setup: Setup) -> Setup:
    """A tenth fewer rollouts at once: the other way to have more cache for each."""
    return replace(setup, max_inflight=max(1, round(setup.max_inflight / FASTER)))


def faster_sync(setup: Setup) -> Setup:
    """Every part of a weight sync."""
    sync = setup.sync
    names = ("pause_s", "save_s", "load_s", "push_s", "lag_s", "lag_deviation_s", "merged_s", "retry_s")
    return replace(setup, sync=replace(sync, **{name: getattr(sync, name) / FASTER for name in names}))


def faster_scoring(setup: Setup) -> Setup:
    """The reward."""
    return replace(setup, score_s=setup.score_s / FASTER)


def like_the_others(setup: Setup) -> Setup:
    """Every replica as fast as the fastest."""
    fastest = min((engine.rates for engine in setup.engines), key=lambda rates: rates.base_s)
    return replace(setup, engines=tuple(replace(engine, rates=fastest) for engine in setup.engines))


SIDES: Mapping[str, Change] = {
    "trainer": faster_trainer,
    "generation": faster_generation,
    "sync": faster_sync,
    "scoring": faster_scoring,
}
CAUSES: Mapping[str, Mapping[str, Change]] = {
    "trainer": {"rows": cheaper_rows, "tokens": cheaper_tokens},
    "generation": {
        "replicas": more_replicas,
        "in-flight": more_in_flight,
        "cache": more_cache,
        "over-admission": fewer_in_flight,
        # Not a tenth, but the whole of what is wrong: replacing one replica is one thing to do, and it is worth naming
        # once it gains more than a tenth more of everything else.
        "slow-replica": like_the_others,
    },
}


@dataclass(frozen=True)
class Labelled:
    """One run: what it logged, and what each intervention gained (0.05: 5 % more trained tokens per second)."""

    scenario: Scenario
    seed: int
    frame: pd.DataFrame
    sides: dict[str, float]
    causes: dict[str, float]


def label(scenario: Scenario, seed: int, steps: int = FIRST_STEPS) -> Labelled:
    """Simulate a scenario, and once more for each intervention; those of a cause only on the side that gains most."""
    base = simulate(scenario.setup(steps, seed), seed)
    packed = scenario.recipe.train.token_budget != 0
    speed = throughput(base, packed)

    def gain(change: Change) -> float:
        return throughput(simulate(change(scenario.setup(steps, seed)), seed), packed) / speed - 1

    sides = {name: gain(change) for name, change in SIDES.items()}
    side = max(sides, key=lambda name: sides[name])
    base_setup = scenario.setup(steps, seed)
    causes = {
        name: 0.0 if change(base_setup) == base_setup else gain(change) for name, change in CAUSES.get(side, {}).items()
    }
    return Labelled(scenario, seed, logged(scenario, base), sides, causes)


def throughput(run: Simulation, packed: bool) -> float:
    """Trained tokens per second, or samples where a step has a fixed number of them; the first eighth left out.

    A row of one sample costs much the same whatever its length, so that tokens would say what happened to be long.
    """
    unit = "batch/trained_tokens_per_step" if packed else "batch/samples_per_step"
    first = len(run.steps) // 8
    began = run.steps[first - 1].ended_at if first else 0.0
    return sum(step.metrics[unit] for step in run.steps[first:]) / (run.seconds - began)


def logged(scenario: Scenario, run: Simulation) -> pd.DataFrame:
    """The log as rlkit's worker writes it.

    One that lacks connections counts all its tasks as in flight, and as admitted, and a rollout's time from there.
    """
    frame, limit, connections = frame_of(run), scenario.recipe.inflight_limit, scenario.connections
    if connections is not None and connections < limit:
        for name in ("rollout/inflight", "rollout/inflight_admitted", "rollout/inflight_cap"):
            frame[name] += limit - connections
        # By Little's law: as many more in flight as finish in the additional time.
        waited = frame["rollout/duration_s"] * (limit / connections - 1)
        for name in ("duration_s", "duration_p95_s", "duration_with_gate_s", "duration_with_gate_p95_s"):
            frame[f"rollout/{name}"] += waited
    return frame


def _faster(engine: Engine, whole: bool) -> Engine:
    rates, capacity = engine.rates, engine.capacity
    return replace(
        engine,
        rates=replace(
            rates,
            base_s=rates.base_s / FASTER if whole else rates.base_s,
            sequence_s=rates.sequence_s / FASTER,
            token_s=rates.token_s / FASTER,
            prefill_token_s=rates.prefill_token_s / FASTER,
        ),
        capacity=replace(capacity, kv_tokens=capacity.kv_tokens * FASTER) if whole else capacity,
    )
