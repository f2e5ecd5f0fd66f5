"""A set-up in, a run out.

    from dataclasses import replace
    from rlkit.simulation.recipes import setup_of
    from rlkit.simulation.simulate import simulate

    setup = setup_of(load_recipe("runs/adaptive-cap/kv8g-main.yaml"))
    fixed = simulate(replace(setup, max_inflight=160), seed=0)
    capped = simulate(replace(setup, cap="rlkit"), seed=0)
    fixed.useful_tok_s, capped.useful_tok_s, capped.preemptions, capped.requests, capped.dropped
    [(decision.time, decision.cap, decision.usage) for decision in capped.decisions]

Other beds: `engines` (a `Capacity` each, so caches may differ), `lengths` (replace(setup.lengths, mean_start=...,
mean_end=...)), `pauses=Pauses(every_s=30, seconds=10)`, `law=` a function that makes any law, `stop_after` for a
shorter run. Pure: no files, clocks or tasks, and the same seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rlkit.admission.law import Decision
from rlkit.serving.router import Routed, RoutingCounts
from rlkit.simulation.events import EventLoop
from rlkit.simulation.setup import Setup
from rlkit.simulation.sync import Sync
from rlkit.simulation.trainer import Trainer
from rlkit.simulation.window import Window
from rlkit.simulation.worker import Worker


@dataclass
class Step:
    """One logged step: its number, when it ended (seconds since the start), TRL's metrics."""

    number: int
    ended_at: float
    metrics: dict[str, float]


@dataclass
class Simulation:
    """A simulated run. Requests are dispatched rollouts, `dropped` samples too old when the trainer came to them."""

    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    preemptions: int = 0
    dropped: int = 0
    trained_samples: int = 0
    trained_tokens: int = 0  # of completions
    generated_tokens: int = 0
    prompt_tokens_queried: float = 0.0
    prompt_tokens_cached: float = 0.0
    syncs: list[Sync] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    routing: RoutingCounts = field(default_factory=lambda: RoutingCounts(0))
    per_engine: list[dict[str, float]] = field(default_factory=list)
    events: int = 0

    @property
    def useful_tok_s(self) -> float:
        """Completion tokens that were trained on, per second of the run."""
        return self.trained_tokens / self.seconds

    @property
    def generated_tok_s(self) -> float:
        """Completion tokens per second of the run."""
        return self.generated_tokens / self.seconds


def simulate(
    setup: Setup,
    seed: int = 0,
    on_step: Callable[[Step], None] | None = None,
    on_routed: Callable[[float, Routed, list[int]], None] | None = None,
) -> Simulation:
    """Run a set-up to its last step; raises RunFailed when a sync would have failed the run.

    `on_step` gets each step, `on_routed` each routed rollout: seconds since the start, what was decided, and what every
    server then has in flight.
    """
    run = Simulation()
    loop, window, dice = EventLoop(), Window(), random.Random(seed)

    def log(number: int, metrics: dict[str, float]) -> None:
        run.steps.append(Step(number, loop.now, metrics))
        if on_step is not None:
            on_step(run.steps[-1])

    def progress() -> float:
        return trainer.progress()

    worker = Worker(loop, setup, window, dice, progress)
    worker.fleet.on_routed = on_routed
    trainer = Trainer(loop, setup, worker, window, dice, log)
    trainer.start()
    loop.run()
    engines = worker.fleet.engines
    run.seconds = loop.now
    run.requests = worker.dispatched
    run.finished = sum(engine.finished for engine in engines)
    run.preemptions = sum(engine.preemptions for engine in engines)
    run.dropped = trainer.dropped
    run.trained_samples, run.trained_tokens = trainer.trained_samples, trainer.trained_tokens
    run.generated_tokens = worker.generated_tokens
    run.prompt_tokens_queried = sum(engine.queried_tokens for engine in engines)
    run.prompt_tokens_cached = sum(engine.cached_tokens for engine in engines)
    run.syncs, run.decisions, run.routing = trainer.syncs, worker.decisions, worker.fleet.router.counts
    run.per_engine = [
        {
            "server": setup.engines[number].server,
            "finished": engine.finished,
            "preemptions": engine.preemptions,
            "queried_tokens": engine.queried_tokens,
            "cached_tokens": engine.cached_tokens,
            "mean_running": engine.running_seconds / loop.now,
        }
        for number, engine in enumerate(engines)
    ]
    run.events = loop.events
    return run
