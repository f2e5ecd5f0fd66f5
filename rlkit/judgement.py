"""Which side of the queue is the slower one, from the signals alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlkit.leverage import CATCHES_UP, FULL, LEAST_LEVERAGE, NO_WAIT, flushed, held_back, leverage
from rlkit.scoring import outlasts_a_step, scores_all_the_time, scoring_words
from rlkit.signals import TIMER_SLACK, Signals
from rlkit.wording import number, percent

Bound = Literal["trainer", "generation", "sync", "scoring", "balanced", "stalled", "undetermined"]
Confidence = Literal["high", "medium", "low"]

# From here on the trainer is short of samples whatever an average of the queue says: groups arrive in bursts, and a
# mean over bursts is neither empty nor full.
LONG_WAIT = 0.2

# A queue below this is empty for practical purposes. Never 0: groups arrive whole. The published generation-bound run
# reads 14 to 16 %, real ones 2 to 5 %.
EMPTY = 0.25

# A queue this full never ran empty within the step, so a trainer that waits in front of it contradicts the log.
BRIM = 0.9

# With less than this many steps' worth of samples the queue is empty at the end of the step, however large it may be.
# Stands in for EMPTY when the size is unknown.
EMPTY_STEPS = 0.5

# The trainer's appetite is an upper bound: it counts full rows (95 % in the published run 2) and prompts, which nobody
# generates (about a tenth of a sequence there). Generation below 0.95 x 0.9 of it is short.
SHORT_SUPPLY = 0.85

# An in-flight gauge this close to its limit never ran low (it counts tasks not yet reaped).
PINNED = 0.95

# From one sample thrown away for every two trained on, the trainer waits as much for fresh samples as for samples.
MANY_THROWN_AWAY = 0.5

# A queue of less than two steps' samples is full before a step and used up within it.
STEPS_IN_QUEUE = 2.0

# Two sides of this leverage or less apart (rlkit.leverage) change places from run to run, and from one seed to another;
# this far apart they never did in the tuning half of simulated runs.
NEAR = 0.1
FAR = 0.25

# Time of this part of the step that nobody explains may be what bounds the run.
LARGE_PART = 1 / 3

# A sample that is older than its rollout took by less than a version was trained on in the step in which it was ready.
QUEUED_VERSIONS = 1.0

# From here on the mean of a phase that varies by half from step to step is known within about a tenth (0.5 / sqrt(20)).
MANY_STEPS = 20


SPLIT_RUN = "Diagnose the parts of the run on their own, before and after the queue changed."
GIVE_RECIPE = "Diagnose the run together with its own recipe, which has rollout.queue_maxsize and the other limits."
LOG_METRICS = "Log the run with TRL's own metrics (tracking.project, as `rlkit run` does), and diagnose it again."


@dataclass(frozen=True)
class Judgement:
    """The slower side, what decided (or why nothing could), and how sure that is."""

    bound: Bound
    reason: str
    confidence: Confidence
    way_out: str = ""  # how to get a verdict, when there is none
    contradicts_itself: bool = False  # no verdict for the whole run, but its parts may have one


def undetermined(reason: str, way_out: str) -> Judgement:
    """No verdict, why, and how to get one."""
    return Judgement("undetermined", reason, "low", way_out)


def judge(signals: Signals) -> Judgement:
    """The slower side according to settled steps' signals."""
    size, most = signals.queue_size, signals.queue_maxsize
    if size is not None and most is not None and size > most:
        why = f"the queue holds {number(size)} samples, which rollout.queue_maxsize {number(most)} does not allow"
        return undetermined(f"{why}: the recipe is not that of this run", GIVE_RECIPE)
    judgement = _without_wait(signals) if signals.wait_share is None else _with_wait(signals, signals.wait_share)
    judgement = _or_scoring(judgement, signals)
    excess = signals.phases_over_step
    if excess is None or excess <= TIMER_SLACK or judgement.bound == "undetermined":
        return judgement
    doubt = f"the phases add up to {percent(excess)} of perf/step_s, so these numbers are not of one kind"
    return replace(judgement, reason=f"{judgement.reason}; {doubt}", confidence="low")


def wait_words(signals: Signals) -> str:
    """`the trainer waits 8 % of the step for rollouts`."""
    bound = "at most " if signals.step_s is None else ""
    return f"the trainer waits {bound}{percent(signals.wait_share or 0.0)} of the step for rollouts"


def queue_words(signals: Signals) -> str:
    """`the queue is full (208 of 256)`."""
    words = {"empty": "nearly empty", "full": "mostly full", "part": "partly filled"}
    brimming = signals.queue_fill is not None and signals.queue_fill >= BRIM
    state = queue_state(signals)
    of = "" if signals.queue_maxsize is None else f" of {number(signals.queue_maxsize)}"
    held = f"{number(signals.queue_size or 0.0)}{of}"
    if state is None:
        return f"the queue holds {held} samples"
    return f"the queue is {'full' if brimming else words[state]} ({held})"


def supply(signals: Signals) -> float | None:
    """Tokens generated per second over the most that the trainer could use."""
    if signals.generated_tok_s is None or not signals.usable_tok_s:
        return None
    return signals.generated_tok_s / signals.usable_tok_s


def _with_wait(signals: Signals, wait: float) -> Judgement:
    contradiction = _contradiction(signals, wait)
    if contradiction is not None:
        return contradiction
    weights = leverage(signals)
    if weights is None or (signals.queue_size is None and wait < LONG_WAIT and not held_back(signals)):
        return _by_wait_and_queue(signals, wait)
    waits, queue = wait_words(signals), queue_state(signals)
    second, first = sorted(weights, key=lambda side: weights[side])[-2:]
    if first == "trainer" and signals.queue_fill is None and not held_back(signals):
        return _by_wait_and_queue(signals, wait)  # whether generation is ahead is what nobody knows
    margin = weights[first] - weights[second]
    sure = _sure(margin, signals)
    about = f"{waits}, and {_queue_or_held_back(signals)}"
    if weights[first] < LEAST_LEVERAGE:
        return Judgement("balanced", f"{about}: neither side is slower by much", "medium" if sure == "high" else "low")
    if first == "sync":
        what = percent(weights["sync"])
        more = "stops trainer and replicas alike" if margin > NEAR else "neither side is much slower than the other"
        return Judgement("sync", f"the weight sync takes {what} of the step, and {more}; {about}", sure)
    if flushed(signals) and wait >= CATCHES_UP:
        dropped = number(100 * (signals.dropped_per_trained or 0.0))
        stale = (
            f"samples that are too old when the trainer comes to them ({dropped} thrown away for every 100 trained on)"
        )
        return Judgement(_side(first), f"{queue_words(signals)} of {stale}, and only so {waits}", "low")
    ahead = wait < NO_WAIT and (queue == "full" or held_back(signals))
    agrees = {"trainer": ahead, "generation": queue == "empty" or wait >= LONG_WAIT}
    if not agrees[first] and sure == "high":
        sure = "medium"
    return Judgement(_side(first), about, sure)


def _contradiction(signals: Signals, wait: float) -> Judgement | None:
    """A full queue hands out samples at once, unless they are too old, or are used up within a step."""
    queue, fill = queue_state(signals), signals.queue_fill or 0.0
    samples, most = signals.samples_per_step, signals.queue_maxsize
    used_up = samples is not None and most is not None and most < STEPS_IN_QUEUE * samples
    full = queue == "full" and not used_up and (wait >= LONG_WAIT or (fill >= BRIM and wait >= NO_WAIT))
    if flushed(signals) or not (full or (signals.queue_size is None and wait >= NO_WAIT and held_back(signals))):
        return None
    sign = queue_words(signals) if full else "finished rollouts are held back by a full queue"
    why = f"the log contradicts itself: {sign} while {wait_words(signals)}, and a full queue hands out samples at once"
    return replace(undetermined(why, SPLIT_RUN), contradicts_itself=True)


def _sure(margin: float, signals: Signals) -> Confidence:
    if margin < NEAR:
        return "low"
    # A sync that was not logged is in what nobody explains.
    if signals.weight_sync_s is None and signals.shares["other"] >= NEAR:
        return "low" if signals.shares["other"] >= LARGE_PART else "medium"
    return "high" if margin >= FAR and signals.steps >= MANY_STEPS else "medium"


def _side(name: str) -> Literal["trainer", "generation"]:
    return "trainer" if name == "trainer" else "generation"


def _queue_or_held_back(signals: Signals) -> str:
    if held_back(signals) and queue_state(signals) != "full":
        return f"finished rollouts are held back in {percent(signals.blocked_steps or 0.0)} of the steps"
    return queue_words(signals)


def _by_wait_and_queue(signals: Signals, wait: float) -> Judgement:
    """Without the parts of the step: an upper bound of the wait, and the queue."""
    queue = queue_state(signals)
    waits = wait_words(signals)
    if wait < NO_WAIT:
        if queue == "full":
            return Judgement("trainer", f"{waits}, and {queue_words(signals)}", "medium")
        if held_back(signals):
            return Judgement("trainer", f"{waits}, and {_queue_or_held_back(signals)}", "medium")
        if queue is not None:
            return Judgement("balanced", f"{waits}, yet {queue_words(signals)}", "medium")
        if signals.blocked_steps == 0.0:
            return Judgement("balanced", f"{waits}, and no finished rollout was ever held back", "low")
        return _unknown_queue(waits, signals)
    if queue == "empty":
        return Judgement("generation", f"{waits}, and {queue_words(signals)}", "medium")
    if wait >= LONG_WAIT:
        also = "" if queue is None else f", although {queue_words(signals)} on average"
        return Judgement("generation", f"{waits}{also}", "medium")
    if queue is None:
        return _unknown_queue(waits, signals)
    return Judgement("balanced", f"{waits}, and {queue_words(signals)}", "low" if queue == "full" else "medium")


def _or_scoring(judgement: Judgement, signals: Signals) -> Judgement:
    """Scoring, where it is what generation waits for, or what goes on when a sync has ended."""
    if judgement.bound == "sync" and scores_all_the_time(signals):
        judgement = replace(judgement, confidence="low")
        if not outlasts_a_step(signals):
            return judgement
    elif judgement.bound not in ("generation", "balanced"):
        return judgement
    if (signals.dropped_per_trained or 0.0) >= MANY_THROWN_AWAY:
        judgement = replace(judgement, confidence="low")  # the trainer may be waiting for samples that are not too old
    if scores_all_the_time(signals):
        if (signals.wait_share or 0.0) < 2 * NO_WAIT:
            judgement = _less_sure(judgement)
        return replace(judgement, bound="scoring", reason=f"{scoring_words(signals)}, and {judgement.reason}")
    return judgement


def _less_sure(judgement: Judgement) -> Judgement:
    return replace(judgement, confidence="low" if judgement.confidence == "low" else "medium")


def _without_wait(signals: Signals) -> Judgement:
    """perf/rollout_wait_s is missing: a full queue still tells, an empty one needs more."""
    queue, sold = queue_state(signals), supply(signals)
    if queue == "full":
        return Judgement("trainer", f"{queue_words(signals)}; perf/rollout_wait_s is not logged", "medium")
    if held_back(signals):
        blocked = percent(signals.blocked_steps or 0.0)
        why = f"finished rollouts are held back in {blocked} of the steps; perf/rollout_wait_s is not logged"
        return Judgement("trainer", why, "medium")
    limit = signals.inflight_limit
    pinned = signals.inflight is not None and limit is not None and signals.inflight >= PINNED * limit > 0
    if queue != "part" and signals.blocked_steps == 0.0 and pinned and sold is not None and sold < SHORT_SUPPLY:
        why = (
            f"no finished rollout was ever held back, all {number(limit or 0.0)} rollouts allowed in flight are, and "
            f"{number(signals.generated_tok_s or 0.0)} tok/s are {percent(sold)} of what the trainer could use; "
            "perf/rollout_wait_s is not logged"
        )
        return Judgement("generation", why, "low")
    if signals.queue_size is None and signals.blocked_steps == 0.0 and _ages_in_flight(signals):
        age, made = signals.staleness_mean or 0.0, signals.rollout_versions or 0.0
        why = (
            f"samples are {number(age)} versions old, {number(made)} of them from being generated: they do not lie in "
            "the queue for long; perf/rollout_wait_s is not logged"
        )
        return Judgement("generation", why, "low")
    if signals.queue_size is None:
        return undetermined("neither perf/rollout_wait_s nor sample/rollout_queue_size is logged", LOG_METRICS)
    state = f"{queue_words(signals)}, but perf/rollout_wait_s is not logged"
    return undetermined(f"{state}: whether the trainer waits cannot be told", LOG_METRICS)


def _ages_in_flight(signals: Signals) -> bool:
    age, made = signals.staleness_mean, signals.rollout_versions
    return age is not None and made is not None and age - made < QUEUED_VERSIONS


def queue_state(signals: Signals) -> Literal["empty", "part", "full"] | None:
    """What the reading means; None when it, or the size of the queue, is not known."""
    if signals.queue_size is None:
        return None
    if signals.queue_fill is not None:
        return "empty" if signals.queue_fill <= EMPTY else "full" if signals.queue_fill >= FULL else "part"
    if signals.queue_maxsize is None and signals.samples_per_step:
        return "empty" if signals.queue_size < EMPTY_STEPS * signals.samples_per_step else None
    return None


def _unknown_queue(waits: str, signals: Signals) -> Judgement:
    if signals.queue_size is None:
        return undetermined(f"{waits}, but sample/rollout_queue_size is not logged", LOG_METRICS)
    if signals.queue_maxsize is None:
        why = f"{waits}, but how many samples the queue may hold is not known ({number(signals.queue_size)} are in it)"
        return undetermined(why, GIVE_RECIPE)
    return undetermined(f"{waits}, but a step takes more samples than the queue holds, so its size says nothing",
                        "Raise rollout.queue_maxsize above the samples of a step.")  # fmt: skip
