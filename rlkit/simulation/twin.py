"""A simulator that runs as one logged run did: its constants scaled until it reproduces what that run measured.

A few figures each set one factor: forward and backward set the seconds of a row, a rollout's duration (or the step,
where the trainer waits) those of an iteration, the sync those of a load, the completions their length. How a change of
recipe moves these is for the built-in constants to say. So a prediction is a ratio: the changed recipe simulated over
the recipe as it was, times what the run measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from rlkit.errors import BadInput
from rlkit.leverage import NO_WAIT
from rlkit.recipe import Recipe
from rlkit.settling import warmup_steps
from rlkit.signals import Signals, column, measure, settled_steps
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import translate
from rlkit.simulation.replica import slower
from rlkit.simulation.setup import Setup
from rlkit.simulation.simulate import simulate

# Simulations until the factors have settled, at most: each figure answers to its own factor almost alone.
ROUNDS = 6

# A figure this near is not brought nearer: lengths of sixty steps' prompts alone differ by as much.
NEAR_ENOUGH = 0.03

# Steps that are simulated to compare with a run: enough for a mean within a few percent.
TWIN_STEPS = 60

# What a factor may be in all and change by in a round: a figure that has nothing to do with its constant is not chased.
LARGEST_FACTOR = 20.0
LARGEST_CHANGE = 3.0

# What the calibrated simulator is compared with the run by.
COMPARED = {
    "step_s": "perf/step_s",
    "fwd_bwd_s": "perf/fwd_bwd_s",
    "rollout_wait_s": "perf/rollout_wait_s",
    "weight_sync_s": "perf/weight_sync_s",
    "generated_tok_s": "rollout/generated_tok_s",
    "rollout_s": "rollout/duration_s",
    "queue_size": "sample/rollout_queue_size",
}


@dataclass(frozen=True)
class Factors:
    """What the built-in constants are multiplied by; `rest_s` is added to each microbatch."""

    rows: float = 1.0  # seconds of a row
    decoding: float = 1.0  # seconds of an iteration and of a prefill
    loading: float = 1.0  # the mount's lag and a load, or a push, or full weights
    lengths: float = 1.0  # tokens of a completion
    rest_s: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Constants that the log has as they are; None where it has not. Seconds."""

    optimizer_s: float | None = None
    pause_s: float | None = None
    save_s: float | None = None
    score_s: float | None = None


@dataclass(frozen=True)
class Twin:
    """The calibrated simulator of one run, and how far from it it is: (simulated, logged) of each figure."""

    factors: Factors
    measured: Measured
    figures: Mapping[str, tuple[float, float]]
    extrapolated: tuple[str, ...] = ()

    def setup(self, recipe: Recipe) -> Setup:
        """A recipe in numbers, by the constants of this run. Raises BadInput."""
        return _scaled(translate(recipe).setup, self.factors, self.measured)

    @property
    def error(self) -> float | None:
        """Of the step's time, simulated over logged, less 1; None when the log has none."""
        pair = self.figures.get("perf/step_s")
        return None if pair is None or not pair[1] else pair[0] / pair[1] - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"figures": {name: list(pair) for name, pair in self.figures.items()}}


def fit_twin(frame: pd.DataFrame, recipe: Recipe) -> Twin:
    """The simulator of the run in `frame`. Raises BadInput when it cannot be simulated, or no time was logged."""
    settled = settled_steps(frame, recipe)
    logged = _run(settled, recipe)
    if logged.signals.fwd_bwd_s is None and logged.signals.step_s is None:
        raise BadInput("the run logged neither perf/step_s nor perf/fwd_bwd_s after its warm-up: nothing to predict by")
    translation = translate(recipe)
    measured = _measured(settled)
    setup = _as_far(translation.setup, int(frame.index.max()), 2 * warmup_steps(recipe))
    factors, seen = Factors(), list[tuple[float, Factors, dict[str, tuple[float, float]]]]()
    before: Mapping[str, Pair] = {}
    for _ in range(ROUNDS):
        simulated = _simulated(_scaled(setup, factors, measured), recipe)
        pairs = _pairs(logged, simulated, setup)
        off = sum(abs(math.log(_over(*pair))) for pair in pairs.values())
        seen.append((off, factors, _compared(logged, simulated)))
        better = _better(factors, pairs, before, logged, simulated, setup)
        before = pairs
        if better == factors:
            break
        factors = better
    _, factors, figures = min(seen, key=lambda one: one[0])
    return Twin(factors, measured, figures, translation.extrapolated)


def _as_far(setup: Setup, logged: int, least: int) -> Setup:
    """The set-up stopped at the part of the run that was logged, lengths included, in few steps."""
    steps = max(min(logged, TWIN_STEPS), least)
    return replace(setup, steps=max(steps, round(steps * setup.steps / max(1, logged))), stop_after=steps)


def _scaled(setup: Setup, factors: Factors, measured: Measured) -> Setup:
    trainer, sync, lengths = setup.trainer, setup.sync, setup.lengths
    known = {name: value for name, value in asdict(measured).items() if value is not None}
    longest = 0.99 * lengths.longest  # no mean reaches the cut
    return replace(
        setup,
        engines=tuple(replace(engine, rates=slower(engine.rates, factors.decoding)) for engine in setup.engines),
        lengths=replace(
            lengths,
            mean_start=min(longest, lengths.mean_start * factors.lengths),
            mean_end=min(longest, lengths.mean_end * factors.lengths),
        ),
        trainer=replace(
            trainer,
            row_s=trainer.row_s * factors.rows,
            row_token_s=trainer.row_token_s * factors.rows,
            sample_s=trainer.sample_s * factors.rows,
            microbatch_s=max(0.0, trainer.microbatch_s + factors.rest_s),
            optimizer_s=known.get("optimizer_s", trainer.optimizer_s),
        ),
        sync=replace(
            sync,
            pause_s=known.get("pause_s", sync.pause_s),
            save_s=known.get("save_s", sync.save_s),
            load_s=sync.load_s * factors.loading,
            push_s=sync.push_s * factors.loading if sync.kind == "push" else sync.push_s,
            lag_s=sync.lag_s * factors.loading,
            merged_s=sync.merged_s * factors.loading,
        ),
        score_s=known.get("score_s", setup.score_s),
    )


def _measured(settled: pd.DataFrame) -> Measured:
    def mean(name: str) -> float | None:
        values = column(settled, name).dropna()
        return statistics.fmean(values) if len(values) else None

    transfer = mean("perf/weight_sync_transfer_s")  # with an adapter, its save
    return Measured(mean("perf/optimizer_s"), mean("perf/weight_sync_pause_s"), transfer, mean("rollout/score_s"))


@dataclass(frozen=True)
class _Run:
    """What is compared of two runs: the signals, and tokens of a completion that was trained on."""

    signals: Signals
    completion_tokens: float | None


def _run(settled: pd.DataFrame, recipe: Recipe) -> _Run:
    signals = measure(settled, recipe)
    tokens, samples = (column(settled, f"batch/{name}_per_step").sum() for name in ("trained_tokens", "samples"))
    # A mean over steps of what ended in each is one of few long and many short steps.
    return _Run(signals, float(tokens / samples) if tokens > 0 and samples > 0 else signals.completion_tokens)


def _simulated(setup: Setup, recipe: Recipe) -> _Run:
    return _run(settled_steps(frame_of(simulate(setup)), recipe), recipe)


Pair = tuple[float | None, float | None]  # logged, simulated


def _pairs(logged: _Run, simulated: _Run, setup: Setup) -> dict[str, Pair]:
    """The figure that sets each factor."""
    fixed_s = setup.sync.pause_s + (setup.sync.save_s if setup.sync.kind != "merged" else 0.0)
    both = (logged.signals, simulated.signals)
    fwd_bwd, step, token, made = (
        tuple(getattr(one, name) for one in both)
        for name in ("fwd_bwd_s", "step_s", "completion_token_s", "generated_tok_s")
    )
    loads = tuple(_beyond(one.weight_sync_load_s, one.weight_sync_s, fixed_s) for one in both)
    # Where the trainer waits generation sets the step; elsewhere its speed shows in the seconds of a token alone.
    waits = _waits(logged, simulated)
    decoding = (step if None not in step else (made[1], made[0])) if waits else token
    lengths = (logged.completion_tokens, simulated.completion_tokens)
    return {"rows": fwd_bwd, "decoding": decoding, "loading": loads, "lengths": lengths}


def _better(
    factors: Factors,
    pairs: Mapping[str, Pair],
    before: Mapping[str, Pair],
    logged: _Run,
    simulated: _Run,
    setup: Setup,
) -> Factors:
    """The factors with which the simulation would come nearer to the log; the same when it is near enough.

    A figure that went past its mark since the round `before` is corrected by half: attempts to load an adapter come at
    intervals, so that their time jumps where the factor moves a little.
    """
    rest = [_rest_s(one.signals) for one in (logged, simulated)]
    step_s, added = logged.signals.step_s, 0.0
    if rest[0] is not None and rest[1] is not None and step_s is not None and not _waits(logged, simulated):
        added = rest[0] - rest[1] if abs(rest[0] - rest[1]) > NEAR_ENOUGH / 3 * step_s else 0.0
    scaled = {}
    for name, pair in pairs.items():
        over = _over(*pair)
        passed = name in before and math.log(over) * math.log(_over(*before[name])) < 0
        scaled[name] = _bounded(getattr(factors, name), math.sqrt(over) if passed else over)
    rest_s = factors.rest_s + added / setup.trainer.gradient_accumulation_steps
    return Factors(**scaled, rest_s=max(-setup.trainer.microbatch_s, rest_s))


def _waits(logged: _Run, simulated: _Run) -> bool:
    return max(one.signals.wait_share or 0.0 for one in (logged, simulated)) >= NO_WAIT


def _beyond(load_s: float | None, sync_s: float | None, fixed_s: float) -> float | None:
    """The part of a sync that a load takes, measured or what pause and save leave."""
    if load_s is not None:
        return load_s
    return None if sync_s is None else max(0.0, sync_s - fixed_s)


def _rest_s(signals: Signals) -> float | None:
    share = signals.shares.get("other")
    return None if share is None or signals.step_s is None else share * signals.step_s


def _bounded(factor: float, change: float) -> float:
    if abs(math.log(change)) <= NEAR_ENOUGH:
        return factor
    change = min(LARGEST_CHANGE, max(1 / LARGEST_CHANGE, change))
    return min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor * change))


def _over(logged: float | None, simulated: float | None) -> float:
    """Their ratio; 1 where one of them is unknown or nothing."""
    return logged / simulated if logged and simulated else 1.0


def _compared(logged: _Run, simulated: _Run) -> dict[str, tuple[float, float]]:
    found = {}
    for name, metric in COMPARED.items():
        pair = getattr(simulated.signals, name), getattr(logged.signals, name)
        if None not in pair:
            found[metric] = pair
    return found
