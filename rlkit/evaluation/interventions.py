"""What bounds a run, by experiment: make one resource 10 % faster, and see how much more it trains on in a second.

The side with the largest gain is the truth about the side, the part of it with the largest gain is the truth about the
cause. Nothing else defines either. Two runs that are compared draw the same lengths and have the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
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
    causes = {name: gain(change) for name, change in CAUSES.get(side, {}).items()}
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
    """The log as rlkit's worker writes it: with the servers' own figures whatever the cap's policy.

    A worker that lacks connections counts all its tasks as in flight, and as admitted.
    """
    frame = frame_of(run)
    limit = scenario.recipe.inflight_limit
    ends = np.array([step.ended_at for step in run.steps])
    seen = pd.DataFrame(
        {
            "step": np.searchsorted(ends, [decision.time for decision in run.decisions]),
            "rollout/inflight_admitted": [decision.in_flight for decision in run.decisions],
            "rollout/kv_cache_usage": [decision.usage for decision in run.decisions],
            "rollout/vllm_running_requests": [decision.running for decision in run.decisions],
            "rollout/vllm_queued_requests": [decision.waiting for decision in run.decisions],
            "rollout/vllm_preemptions_total": [decision.preemptions for decision in run.decisions],
        }
    ).astype("float64")
    per_step = seen.groupby("step").agg({name: "sum" if "total" in name else "mean" for name in seen.columns[1:]})
    per_step = per_step.reindex(range(len(run.steps))).set_axis(frame.index)
    frame[per_step.columns] = per_step
    if scenario.connections is not None and scenario.connections < limit:
        hidden = limit - scenario.connections
        frame["rollout/inflight"] = frame["rollout/inflight"] + hidden
        frame["rollout/inflight_admitted"] = frame["rollout/inflight_admitted"] + hidden
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
