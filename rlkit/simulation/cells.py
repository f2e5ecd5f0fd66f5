"""How each published figure is read off a simulated run, and how near it has to come.

Sources leave open whether a figure is a median, a mean of steps, or a total over the time; for tokens per second they
lie a quarter apart. So every cell says which one is taken, one statistic for one figure in all runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlkit.recipe import Recipe
from rlkit.settling import warmup_steps
from rlkit.simulation.simulate import Simulation


@dataclass(frozen=True)
class SimulatedRun:
    """A recipe and what its simulation gave."""

    recipe: Recipe
    run: Simulation

    def values(self, metric: str) -> list[float]:
        """A metric in all steps after the warm-up that logged it."""
        steps = self.run.steps[warmup_steps(self.recipe) :]
        return [step.metrics[metric] for step in steps if metric in step.metrics]


Measure = Callable[[SimulatedRun], float]


@dataclass(frozen=True)
class Statistic:
    """How a figure is measured, in words and in code; no `measure`: the simulator has no physics for it."""

    text: str
    measure: Measure | None


@dataclass(frozen=True)
class Tolerance:
    """How near is near enough.

    `relative` to the published value, `absolute` in its unit, a `factor` either way, `below` a bound, or `between` two,
    whatever was published.
    """

    kind: Literal["relative", "absolute", "factor", "below", "between"]
    bound: float
    upper: float = math.inf

    def allows(self, simulated: float, low: float, high: float) -> bool:
        """Whether a simulated value is near enough to what was published, a value or a range."""
        match self.kind:
            case "below":
                return simulated < self.bound
            case "between":
                return self.bound <= simulated <= self.upper
            case "absolute":
                return low - self.bound <= simulated <= high + self.bound
            case "factor":
                return low / self.bound <= simulated <= high * self.bound
            case "relative":
                return low * (1 - self.bound) <= simulated <= high * (1 + self.bound)

    @property
    def text(self) -> str:
        """In words."""
        match self.kind:
            case "below":
                return f"under {self.bound:g}"
            case "between":
                return f"{self.bound:g} to {self.upper:g}"
            case "absolute":
                return "exactly" if not self.bound else f"± {self.bound:g}"
            case "factor":
                return f"factor {self.bound:g}"
            case "relative":
                return f"{self.bound:.0%}"


def p50(metric: str) -> Statistic:
    """The median over steps."""
    return Statistic("median of steps", lambda run: statistics.median(run.values(metric) or [math.nan]))


def mean(metric: str) -> Statistic:
    """The mean over the steps that logged it."""
    return Statistic("mean of steps", lambda run: statistics.fmean(run.values(metric) or [math.nan]))


def lowest(metric: str) -> Statistic:
    """The lowest step."""
    return Statistic("lowest step", lambda run: min(run.values(metric), default=math.nan))


def highest(metric: str) -> Statistic:
    """The highest step."""
    return Statistic("highest step", lambda run: max(run.values(metric), default=math.nan))


def whole(text: str, measure: Measure) -> Statistic:
    """Something of the run as a whole."""
    return Statistic(text, measure)


def _attempts(wanted: int) -> Measure:
    return lambda run: float(sum(attempts == wanted for sync in run.run.syncs for attempts in sync.attempts))


def _sync_s(run: SimulatedRun) -> float:
    return math.fsum(sync.seconds for sync in run.run.syncs)


def _accept_s(run: SimulatedRun) -> float:
    return statistics.median(sync.accept_s for sync in run.run.syncs)


def _in_flight(end: Callable[[list[float]], float]) -> Measure:
    def measure(run: SimulatedRun) -> float:
        capped = run.recipe.cap.policy != "none"
        return end(run.values("rollout/inflight_admitted" if capped else "rollout/inflight"))

    return measure


def _split(end: Callable[[list[int]], int], of: Callable[[SimulatedRun], float]) -> Measure:
    def measure(run: SimulatedRun) -> float:
        routing = run.run.routing
        return end([routing.on(server) for server in range(routing.replicas)]) * of(run)

    return measure


_NO_PHYSICS = Statistic("no physics: not simulated", None)

# A figure with two ends (low, high) in published.json is one cell for each where it has two statistics here, and
# a range to fall into where it has one.
STATISTICS: Mapping[str, tuple[Statistic, ...]] = {
    "perf/step_s": (p50("perf/step_s"),),
    "perf/fwd_bwd_s": (p50("perf/fwd_bwd_s"),),
    "perf/fwd_s": (p50("perf/fwd_s"),),
    "perf/rollout_wait_s": (p50("perf/rollout_wait_s"),),
    "sample/rollout_queue_size": (p50("sample/rollout_queue_size"),),
    "rollout/backpressure_s": (mean("rollout/backpressure_s"),),
    "rollout/backpressure_s_min": (lowest("rollout/backpressure_s"),),
    "perf/mfu_fwd_bwd": (p50("perf/mfu_fwd_bwd"),),
    "batch/samples_per_row": (mean("batch/samples_per_row"),),
    "batch/microbatches_per_step": (mean("batch/microbatches_per_step"),),
    "batch/samples_per_step": (mean("batch/samples_per_step"),),
    "batch/row_fill_frac": (mean("batch/row_fill_frac"),),
    "mean_sequence_tokens": (mean("sample/forwarded_tokens_mean"),),
    "rollout/generated_tok_s": (mean("rollout/generated_tok_s"),),
    "generated_tok_s": (mean("rollout/generated_tok_s"),),
    "sample/staleness_mean": (mean("sample/staleness_mean"),),
    "staleness_mean": (mean("sample/staleness_mean"),),
    "sample/staleness_max": (highest("sample/staleness_max"),),
    "perf/weight_sync_s": (p50("perf/weight_sync_s"),),
    "perf/weight_sync_s_range": (lowest("perf/weight_sync_s"), highest("perf/weight_sync_s")),
    "weight_sync_pause_s": (p50("perf/weight_sync_pause_s"),),
    "weight_sync_save_s": (p50("perf/weight_sync_transfer_s"),),
    "weight_sync_accept_s": (whole("median of syncs", _accept_s),),
    "weight_sync_amortised_s": (whole("sum of syncs / steps", lambda run: _sync_s(run) / len(run.run.steps)),),
    "syncs": (whole("count", lambda run: float(len(run.run.syncs))),),
    "adapter_loads": (whole("count", lambda run: float(sum(len(sync.attempts) for sync in run.run.syncs))),),
    "loads_second_attempt": (whole("count", _attempts(2)),),
    "loads_third_attempt": (whole("count", _attempts(3)),),
    "sync_share_of_wall": (whole("sum of syncs / wall-clock", lambda run: _sync_s(run) / run.run.seconds),),
    "wall_clock_min": (whole("whole run", lambda run: run.run.seconds / 60),),
    "samples_trained": (whole("count", lambda run: float(run.run.trained_samples)),),
    "rollout/inflight": (mean("rollout/inflight"),),
    "inflight_split": tuple(
        whole(
            "share of what was routed x in flight",
            _split(end, lambda run: run.recipe.inflight_limit / run.run.routing.routed),
        )
        for end in (min, max)
    ),
    "preemptions": (whole("count", lambda run: float(run.run.preemptions)),),
    "inflight": (
        whole("lowest step", _in_flight(lambda values: min(values, default=math.nan))),
        whole("highest step", _in_flight(lambda values: max(values, default=math.nan))),
    ),
    "latency_s": (mean("rollout/duration_s"),),
    "stale_dropped_over_trained": (whole("dropped / trained", lambda run: run.run.dropped / run.run.trained_samples),),
    "rollouts": (whole("count", lambda run: float(run.run.requests)),),
    "routed": tuple(whole("count", _split(end, lambda run: 1.0)) for end in (min, max)),
    "affinity": (whole("count", lambda run: float(run.run.routing.of("affinity"))),),
    "spilled": (whole("count", lambda run: float(run.run.routing.of("spilled"))),),
    "unmatched": (whole("count", lambda run: float(run.run.routing.of("unmatched"))),),
    "reward_first20_last20": (_NO_PHYSICS,),
    "reward_251_300": (_NO_PHYSICS,),
    "ratio_range": (_NO_PHYSICS,),
}

_FIVE_PERCENT = Tolerance("relative", 0.05)
_NO_WAIT = Tolerance("below", 0.1)
_CHASE_TOKENS = Tolerance("relative", 0.12)

# What the simulator is held to. A figure that is not here is shown and not judged.
TOLERANCES: Mapping[str, Tolerance] = {
    "perf/fwd_bwd_s": _FIVE_PERCENT,
    "perf/fwd_s": _FIVE_PERCENT,
    "batch/samples_per_step": _FIVE_PERCENT,
    "batch/samples_per_row": _FIVE_PERCENT,
    "batch/row_fill_frac": _FIVE_PERCENT,
    "perf/step_s": _FIVE_PERCENT,
    "wall_clock_min": _FIVE_PERCENT,
    "perf/mfu_fwd_bwd": Tolerance("relative", 0.08),
    "sample/rollout_queue_size": _FIVE_PERCENT,
    "perf/rollout_wait_s": _NO_WAIT,
    "rollout/generated_tok_s": _CHASE_TOKENS,
    "generated_tok_s": Tolerance("relative", 0.06),
    "perf/weight_sync_s": Tolerance("relative", 0.10),
    "sample/staleness_mean": Tolerance("absolute", 0.25),
    "staleness_mean": Tolerance("absolute", 0.25),
    "affinity": Tolerance("relative", 0.03),
    "unmatched": Tolerance("relative", 0.10),
    "spilled": Tolerance("factor", 2.0),
    "latency_s": Tolerance("relative", 0.08),
    "preemptions": Tolerance("relative", 0.15),
    "stale_dropped_over_trained": Tolerance("absolute", 0.06),
    "inflight": Tolerance("relative", 0.15),
}
# Where one run is held to something else.
TOLERANCES_OF_RUNS: Mapping[tuple[str, str], Tolerance] = {
    ("r1-dp2-tb16k-nockpt", "sample/rollout_queue_size"): Tolerance("between", 40, 110),
    ("r1-dp2-tb16k-nockpt", "perf/rollout_wait_s"): Tolerance("between", 0.3, 1.0),
    ("r1-dp3-inflight384", "rollout/backpressure_s"): Tolerance("relative", 0.20),
    ("r1-dp2", "rollout/backpressure_s"): Tolerance("factor", 1.6),
    ("kv8g-caponly", "preemptions"): Tolerance("relative", 0.10),
    ("kv8g-cap", "preemptions"): Tolerance("below", 500),
    ("kv8g-caponly", "stale_dropped_over_trained"): Tolerance("absolute", 0.0),
    ("kv8g-cap", "stale_dropped_over_trained"): Tolerance("absolute", 0.0),
}
