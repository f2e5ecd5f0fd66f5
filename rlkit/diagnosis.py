"""A run's frame in, a verdict out: what bounds the run, the evidence, and what to change.

In asynchronous GRPO two machines feed each other through a queue of bounded size, and whichever is slower shows in
it: with a slow trainer the queue is full, rollouts are held back and the trainer never waits; with slow generation the
queue is empty and the trainer waits. Both signs must agree. What is missing or contradicts itself makes the verdict
`undetermined`, with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict

from rlkit.causes import Cause, causes_of, first_cause, shorten_sync, sync_is_large
from rlkit.evidence import PHASE_WORDS, Evidence, evidence_of
from rlkit.judgement import (
    LOG_METRICS,
    Judgement,
    judge,
    queue_state,
    queue_words,
    undetermined,
    wait_words,
)
from rlkit.recipe import Recipe
from rlkit.rows import in_order
from rlkit.scoring import scoring_words
from rlkit.settling import MIN_STEPS, warmup_steps
from rlkit.signals import Signals, column, measure, settled_steps
from rlkit.stall import stalled
from rlkit.timeline import Stretch, timeline
from rlkit.turning import contradictions, would_change
from rlkit.wording import number, percent

__all__ = ["Evidence", "NamedCause", "Stretch", "Verdict", "diagnose"]

# How often a verdict of each confidence may be expected to have the side right; `rlkit evaluate-diagnosis` counts.
PROBABILITY = {"high": 0.9, "medium": 0.7, "low": 0.5}

# One of these has to be there; each of the rules needs at least two.
DECISIVE = ("perf/rollout_wait_s", "sample/rollout_queue_size", "rollout/inflight", "perf/fwd_bwd_s")


class NamedCause(BaseModel):
    """A cause, what it costs (seconds of a step, None: the log cannot say), and the field of the recipe to change."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    name: str
    text: str
    seconds: float | None
    next_action: str


class Verdict(BaseModel):
    """What bounds a run, why, and what to do about it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    bound: Literal["trainer", "generation", "sync", "scoring", "balanced", "stalled", "undetermined"]
    reason: str  # what decided, or why nothing could
    confidence: Literal["high", "medium", "low"]
    headline: str  # one sentence
    cause: str | None  # what holds the slower side back; None when no side is slower
    next_action: str  # one sentence naming the recipe's field
    evidence: list[Evidence]
    shares: dict[str, float]  # forward_backward, rollout_wait, weight_sync, optimizer, other: sum 1; empty when unknown
    signals: dict[str, float | None]
    steps: int  # settled steps that the verdict rests on
    probability: float = 0.0  # that the side is right; 0 when there is none
    causes: list[NamedCause] = []  # of the side first, then others worth naming; each by the time it costs
    would_change: str = ""  # one sentence: what would make it another verdict
    contradictions: list[str] = []  # signals that cannot all be true of one run, a sentence each
    timeline: list[Stretch] = []


def diagnose(frame: pd.DataFrame, recipe: Recipe | None = None, now: datetime | None = None) -> Verdict:
    """What bounds the run in `frame` (as `rlkit.tracking` makes it): an opinion on any frame, never an exception.

    The first steps are set aside (`settling.warmup_steps`). Phases without a metric of their own in the log (an old TRL
    has no optimizer time) count as `other` in `shares`. Without the recipe the limits are not known, and most verdicts
    are less sure. `now` (aware) is for a run that goes on: it may have stalled since its last row.

    >>> steps = pd.DataFrame({"perf/step_s": 2.0, "perf/rollout_wait_s": 1.5, "perf/fwd_bwd_s": 0.4}, range(1, 31))
    >>> diagnose(steps).bound, diagnose(steps.head(3)).bound
    ('generation', 'undetermined')
    """
    frame = in_order(frame)
    settled = settled_steps(frame, recipe)
    signals = measure(settled, recipe)
    judgement = stalled(frame, now) or _too_little(frame, signals, recipe) or judge(signals)
    if judgement.contradicts_itself:
        judgement = _with_halves(judgement, settled, recipe)
    cause, action = _advice(judgement, signals, recipe)
    return Verdict(
        bound=judgement.bound,
        reason=judgement.reason,
        confidence=judgement.confidence,
        headline=_headline(judgement, signals),
        cause=cause,
        next_action=action,
        evidence=evidence_of(signals, recipe),
        shares=signals.shares,
        signals=signals.numbers(),
        steps=signals.steps,
        probability=0.0 if judgement.bound == "undetermined" else PROBABILITY[judgement.confidence],
        causes=[_named(cause) for cause in causes_of(judgement.bound, signals, recipe)],
        would_change=would_change(judgement, signals),
        contradictions=contradictions(signals),
        timeline=timeline(settled, recipe),
    )


def _named(cause: Cause) -> NamedCause:
    return NamedCause(name=cause.name, text=cause.text, seconds=cause.seconds, next_action=cause.next_action)


def _too_little(frame: pd.DataFrame, signals: Signals, recipe: Recipe | None) -> Judgement | None:
    warmup = warmup_steps(recipe)
    wait_for_more = f"Let it run on (train.steps): a verdict needs {MIN_STEPS} steps after the first {warmup}."
    if frame.empty:
        return undetermined("the run has not logged a step", wait_for_more)
    logged = [name for name in DECISIVE if name in frame]
    if not logged:
        return undetermined(f"the run logged none of {', '.join(DECISIVE)}", LOG_METRICS)
    if not any(column(frame, name).notna().any() for name in logged):
        return undetermined(f"{', '.join(logged)} never had a finite value", LOG_METRICS)
    if signals.steps < MIN_STEPS:
        steps = f"only {signals.steps}" if signals.steps else "none"
        why = f"{steps} of the {len(frame)} logged steps can be used: the first {warmup} are warm-up and set aside"
        return undetermined(why, wait_for_more)
    return None


def _with_halves(judgement: Judgement, settled: pd.DataFrame, recipe: Recipe | None) -> Judgement:
    """A run that changed midway averages to a contradiction; its halves then disagree with each other."""
    middle = len(settled) // 2
    halves = [measure(part, recipe) for part in (settled.iloc[:middle], settled.iloc[middle:])]
    if any(half.steps < MIN_STEPS for half in halves):
        return judgement
    first, second = (judge(half).bound for half in halves)
    if first == second or "undetermined" in (first, second):
        return judgement
    change = f"the first half of the run is {_label(first).lower()} and the second {_label(second).lower()}"
    return replace(judgement, reason=f"{judgement.reason}: {change}")


def _advice(judgement: Judgement, signals: Signals, recipe: Recipe | None) -> tuple[str | None, str]:
    """The cause, when a side is slower, and the next action."""
    if judgement.bound in ("undetermined", "stalled"):
        return None, judgement.way_out
    if judgement.bound != "balanced":
        cause = first_cause(judgement.bound, signals, recipe)
        return cause.text, cause.next_action
    both = "Neither side waits long for the other: to go faster, raise serve.replicas and train.processes together"
    return None, f"{both}; to shorten the sync, {shorten_sync(signals, recipe)}." if sync_is_large(
        signals
    ) else f"{both}."


def _headline(j: Judgement, s: Signals) -> str:
    if j.bound in ("undetermined", "stalled"):
        return f"{_label(j.bound)}: {j.reason}."
    if j.bound == "sync":
        what = f"the weight sync takes {percent(s.sync_share or 0.0)} of the step"
        more = ", more than training or generation" if 2 * (s.sync_share or 0.0) > 1 else " and stops both sides"
        return f"Sync-bound: {what}{more}."
    if j.bound == "scoring":
        return f"Scoring-bound: {scoring_words(s)}, and {wait_words(s)}."
    if j.bound == "trainer":
        busy = {name: share for name, share in s.shares.items() if name != "rollout_wait"}
        phase = max(busy, key=lambda name: busy[name]) if busy else None
        first = wait_words(s) if phase is None else f"{PHASE_WORDS[phase]} takes {percent(busy[phase])} of the step"
        if phase is None and s.wait_share is None:
            first = "generation is faster"
        blocked = f"finished rollouts are held back in {percent(s.blocked_steps or 0.0)} of the steps"
        second = queue_words(s) if queue_state(s) == "full" else blocked
        return f"Trainer-bound: {first} and {second}."
    if s.wait_share is None:
        inflight = f"all {number(s.inflight or 0.0)} rollouts allowed in flight are"
        return f"Generation-bound: {inflight}, and no finished one was ever held back."
    queue = "" if s.queue_size is None else f" and {queue_words(s)}"
    return f"{_label(j.bound)}: {wait_words(s)}{queue}."


def _label(bound: str) -> str:
    return bound.capitalize() if bound in ("balanced", "undetermined", "stalled") else f"{bound.capitalize()}-bound"
