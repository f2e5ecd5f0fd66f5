"""Runs to diagnose: recipes and machines drawn at random around every cause, borderline ones included.

A kind only says around what a scenario is drawn; what bounds it is for an intervention to show, and many a scenario of
one kind turns out to be bound by something else. Nothing is thrown out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from rlkit.evaluation.paired import paired
from rlkit.recipe import Recipe, parse_recipe
from rlkit.simulation.constants import BETWEEN_PROMPTS, WITHIN_PROMPT, Physics, Workload
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.replica import slower
from rlkit.simulation.setup import Setup
from rlkit.simulation.simulate import simulate

KINDS = (
    "tiny rows",
    "packed rows",
    "replicas",
    "client limit",
    "connections",
    "cache",
    "slow replica",
    "sync",
    "scoring",
    "border",
)

# Small enough that a run takes a fraction of a second, large enough that a step is more than a few groups.
GROUPS_PER_STEP = (2, 3, 4)
GENERATIONS = 8

# Shorter than the published 500: lengths then hardly change over the steps that are simulated.
STEPS = 500

# A trainer this much faster than the measured one never keeps generation waiting.
INSTANT = 0.02
BALANCE_STEPS = 40


@dataclass(frozen=True)
class Scenario:
    """A recipe, the machine it runs on, and what is wrong with it that the recipe does not say.

    `connections` is how many its client really opens (None: all it wants), `slowness` how many times longer the first
    replica takes for everything.
    """

    name: str
    kind: str
    recipe: Recipe
    physics: Physics
    workload: Workload
    connections: int | None = None
    slowness: float = 1.0

    @property
    def number(self) -> int:
        """Its place among those that were drawn with it, which is in its name."""
        return int(self.name.removeprefix("s"))

    @property
    def lacks_connections(self) -> bool:
        """Whether the client opens fewer connections than it may have rollouts in flight."""
        return self.connections is not None and self.connections < self.recipe.inflight_limit

    def setup(self, steps: int, seed: int) -> Setup:
        """In the simulator's terms; `seed` draws the lengths."""
        setup = setup_of(self.recipe, self.physics, self.workload)
        limit = setup.max_inflight if self.connections is None else min(self.connections, setup.max_inflight)
        first, *others = setup.engines
        engines = (replace(first, rates=slower(first.rates, self.slowness)), *others)
        lengths = paired(setup.lengths, seed)
        return replace(setup, engines=engines, lengths=lengths, max_inflight=limit, stop_after=steps)


def scenarios(count: int, seed: int = 0) -> list[Scenario]:
    """`count` scenarios, the kinds taking turns; the same seed makes the same ones."""
    return [_scenario(number, random.Random(seed * 1_000_003 + number)) for number in range(count)]


def _scenario(number: int, dice: random.Random) -> Scenario:
    kind = KINDS[number % len(KINDS)]
    spread = _log(dice, 0.7, 1.4)  # how far from its centre: some of every kind come near another's
    samples = GENERATIONS * dice.choice(GROUPS_PER_STEP)
    mean = round(_log(dice, 300, 1500), -1)
    processes = dice.choice((1, 2))
    packed = kind not in ("tiny rows",) and dice.random() < 0.8
    budget = dice.choice((8192, 16384)) if packed else 0
    rows = max(1, math.ceil(samples * (mean + 135) / (0.93 * budget * processes))) if packed else samples // processes
    staleness = dice.choice((2, 4, 4, 6))
    interval = dice.choice((1, 2, 4))
    replicas = dice.choice((1, 2, 3))
    inflight = samples * dice.choice((2, 3, 4))
    queue = samples * dice.choice((2, staleness, 2 * staleness))
    trainer, score, lag = _log(dice, 0.5, 1.0), _log(dice, 0.01, 0.1), dice.choice((1.0, 3.0))
    kind_of_sync = dice.choice(("push", "push", "bucket"))
    retry = dice.choice((0.5, 2.0))
    cache_gib: float | None = None
    connections: int | None = None
    slowness = 1.0
    cap = dice.choice(("none", "published"))
    checkpointing = dice.random() < 0.5
    match kind:
        case "tiny rows":
            trainer = _log(dice, 0.6, 2.5)
        case "packed rows":
            trainer = _log(dice, 1.0, 5.0)
        case "replicas":
            # Many in flight on one replica, and a fast trainer.
            replicas, trainer, inflight = 1, 0.3 * spread, samples * dice.choice((6, 8, 12))
            queue, staleness = 2 * samples * 12, 12
        case "client limit":
            trainer, inflight = 0.3 * spread, max(8, GENERATIONS * round(_log(dice, 1, 6)))
        case "connections":
            trainer, connections = 0.3 * spread, max(4, round(_log(dice, 6, 48)))
        case "cache":
            staleness = dice.choice((4, 8))
            inflight = samples * 4
            # Room for a part of what is in flight.
            cache_gib = round(28672 * inflight / replicas * (135 + mean) * _log(dice, 0.15, 0.9) / 2**30 + 0.12, 3)
            trainer = _log(dice, 0.2, 0.8)
        case "slow replica":
            replicas, trainer, slowness = dice.choice((2, 2, 3, 4)), 0.4 * spread, _log(dice, 1.05, 4.0)
            inflight, staleness = samples * dice.choice((2, 4, 6)), dice.choice((4, 8))
            queue = 2 * samples * staleness
        case "sync":
            trainer, interval, kind_of_sync = _log(dice, 0.2, 0.6), dice.choice((1, 1, 2)), "bucket"
            lag = _log(dice, 2.0, 12.0)
        case "scoring":
            trainer, score = _log(dice, 0.3, 0.8), _log(dice, 0.3, 3.0)
        case _:
            # Trainer, scoring and generation all drawn around the same rate; half of them made of the same rate below.
            trainer, inflight = _log(dice, 0.4, 1.6), samples * dice.choice((1, 2))
    data = {
        "name": f"s{number:04d}",
        "engine": "sim",
        "model": {"name": "Qwen/Qwen2.5-Math-1.5B"},
        "data": {"name": "simulated"},
        "reward": "rlkit.training.rewards:boxed_math",
        "sampling": {"num_generations": GENERATIONS, "max_completion_length": 3000},
        "train": {
            "steps": STEPS,
            "token_budget": budget,
            "gradient_accumulation_steps": rows,
            "gradient_checkpointing": checkpointing,
            "processes": processes,
        },
        "rollout": {
            "max_staleness": staleness,
            "weight_sync_steps": interval,
            "max_inflight_tasks": inflight,
            "queue_maxsize": queue,
        },
        "serve": {
            "replicas": replicas,
            "max_model_len": 4096,
            "max_loras": staleness + 2,
            "kv_cache_gib": None if cache_gib is None else max(cache_gib, 0.12),
        },
        "transport": {"kind": kind_of_sync, "retry_s": retry},
        "cap": {"policy": "none" if kind in ("cache", "connections") else cap},
        "hardware": {"trainer": f"h200x{processes}", "replica": "h200", "usd_per_hour": 5.0 * (processes + replicas)},
    }
    workload = Workload(mean, mean, BETWEEN_PROMPTS, WITHIN_PROMPT, 1460, 135, 23, 40.0, trainer_factor=trainer)
    physics = replace(Physics(), score_s=score, lag_s=lag)
    drawn = Scenario(str(data["name"]), kind, parse_recipe(data, "scenario"), physics, workload, connections, slowness)
    return balanced(drawn, dice.gauss(1.0, 0.03)) if kind == "border" and dice.random() < 0.5 else drawn


def balanced(scenario: Scenario, slower: float = 1.0) -> Scenario:
    """The scenario with a trainer that takes `slower` times as long for a step as generation does."""
    run = simulate(_with_trainer(scenario, INSTANT).setup(BALANCE_STEPS, 0), 0)
    steps = [step.metrics for step in run.steps[BALANCE_STEPS // 4 :]]
    free = sum(step["perf/rollout_wait_s"] + step["perf/fwd_bwd_s"] for step in steps)
    computed = sum(step["perf/fwd_bwd_s"] for step in steps)
    return _with_trainer(scenario, INSTANT * slower * free / computed)


def _with_trainer(scenario: Scenario, factor: float) -> Scenario:
    return replace(scenario, workload=replace(scenario.workload, trainer_factor=factor))


def _log(dice: random.Random, low: float, high: float) -> float:
    """Evenly over the orders of magnitude."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))
