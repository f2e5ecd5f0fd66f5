"""How much of a run's speed hangs on each side: what part of the step follows a side's own speed. Pure.

A side of leverage 0.5 that gets 1 % faster makes the step 0.5 % shorter. The trainer's follows how far generation is
ahead of it, generation's how long the trainer waits, and the weight sync stops both: the three need not add up to 1.
The rules were read off interventions on simulated runs whose sides are about as fast as each other (rlkit.evaluation).
"""

from __future__ import annotations

from rlkit.signals import Signals
from rlkit.waste_causes import FULL_CACHE, is_crowded

# A trainer that waits for less than this is not short of samples. Published trainer-bound runs wait for under 1 % of
# the step, a real one on two cores for 1 %; fetching a ready sample is never quite free.
NO_WAIT = 0.05

# The experiment behind a label: a tenth faster takes this part off what follows it.
TENTH_FASTER = 1 - 1 / 1.1

# Generation that is a tenth faster saves no more than the trainer waits, and of a wait that comes in bursts a little
# less than all.
SAVED_OF_WAIT = 0.85

# A trainer that waits for this part of the step beyond fetching has used up what generation is ahead of it: while a
# sync is asked for, replicas still generate what it waits for.
CATCHES_UP = 0.018

# Fetching samples that are ready is never free; what every step waits, up to this part, is no want of samples. The
# published trainer-bound runs fetch in under 1 % of the step, real ones on two cores in 1 %.
FETCHING = 0.015

# With this many steps' samples in the queue a faster trainer has half to gain of what it would with a full one: what is
# ahead of it lasts over some of generation's bursts. With more it comes near to all as the fourth power. In simulated
# runs the trainer's own wait says nothing beyond that.
HALF_AHEAD_STEPS = 1.8
AHEAD_POWER = 4.0

# Rollouts that are held back in every step are ahead of any trainer, however small the queue; in fewer steps than this
# part, what else there is decides. While finished rollouts wait for room, those in flight go on: a short while of it
# costs generation nothing. Held back for the first of these parts of all time says nothing yet, for the second all.
OFTEN_BLOCKED = 0.9
BRIEFLY_HELD = 0.6
LONG_HELD = 0.8

# So many samples thrown away for each trained on, while others are held back, are more than the trainer could use.
MANY_SPARE = 0.5

# Where nobody knows the samples of a step, or whether rollouts are held back, a queue is ahead once it is nearly full:
# not at all below the first of these parts, and wholly above the second.
NOTHING_AHEAD = 0.4
WHOLLY_AHEAD = 0.9

# Of a queue that is used up within a step, or not logged, nobody knows.
UNKNOWN_AHEAD = 0.5

# Faster replicas also generate more that is thrown away: of their leverage this part, for each sample thrown away per
# sample trained on, up to one.
FOR_THE_BIN = 0.2

# A side with less leverage gains less than 2 % when it gets a tenth faster: nothing in particular bounds the run.
LEAST_LEVERAGE = 0.02 / TENTH_FASTER

# Rollouts held back in most of the steps: generation is ahead of the trainer, whatever the queue's average. Real
# trainer-bound run: in all of them; generation-bound and learning runs: in none.
MOSTLY_BLOCKED = 0.5

# One sample thrown away for every ten trained on explains a trainer that waits in front of a full queue.
FLUSHED = 0.1

# A queue above this is full for practical purposes: stale samples are thrown out in batches, and a real trainer-bound
# run reads between 50 % and 107 % from step to step.
FULL = 0.6

# Replicas generate until they have stopped, which on average half of a pause goes by before (rlkit.simulation.trainer):
# this part of it a trainer loses and one that waits for generation does not.
STILL_GENERATING = 0.5

# Faster replicas have more cache as well; where that is full it limits how many sequences run at once, and each of the
# two gains. In simulated runs by 1.5 to 1.9 times the part of the step that replicas generate in, where the cache was
# full all the time, and not at all where it read 90 %.
MORE_OF_FULL_CACHE = 0.7


def flushed(signals: Signals) -> bool:
    """Whether the trainer waits in front of a full queue because what is in it is too old."""
    # A queue that is used up within a step has no reading of its own; that rollouts are held back says it was full.
    full = signals.queue_fill is None or signals.queue_fill + _thrown_out(signals) >= FULL
    return full and held_back(signals) and (signals.dropped_per_trained or 0.0) >= FLUSHED


def leverage(signals: Signals) -> dict[str, float] | None:
    """Of trainer, generation and sync, each 0 to 1; None where the step's parts are not known.

    Generation's is up to 1.7 where replicas lack cache, of which faster ones have more.
    """
    wait, sync = signals.wait_share, signals.sync_share or 0.0
    if signals.step_s is None or not signals.shares or wait is None:
        return None
    computing = signals.shares["forward_backward"] + signals.shares["optimizer"]
    other = signals.shares["other"]
    # What lies between the phases is the trainer's own, unless it is the larger part: then nobody knows whose it is.
    busy = computing + other if other < computing else other
    if flushed(signals):
        return {"trainer": busy, "generation": wait, "sync": sync}
    starved = max(0.0, wait - min(signals.least_wait_share or 0.0, FETCHING))
    caught_up = min(1.0, starved / CATCHES_UP)
    goes_on = min(sync, STILL_GENERATING * (signals.pause_share or 0.0))
    more = 1.0 + MORE_OF_FULL_CACHE * _full_cache(signals)
    useful = 1.0 - FOR_THE_BIN * min(1.0, signals.dropped_per_trained or 0.0)
    return {
        "trainer": busy * _ahead(signals),
        "generation": useful * min(more * (1.0 - sync + goes_on), SAVED_OF_WAIT * starved / TENTH_FASTER),
        "sync": sync - goes_on * caught_up,
    }


def held_back(signals: Signals) -> bool:
    """Whether finished rollouts found the queue full in most of the steps."""
    return signals.blocked_steps is not None and signals.blocked_steps >= MOSTLY_BLOCKED


def _thrown_out(signals: Signals) -> float:
    """Samples thrown away in a step, of a full queue: they are the oldest, and gone before the queue is read."""
    if signals.samples_per_step is None or not signals.queue_full_reading:
        return 0.0
    return (signals.dropped_per_trained or 0.0) * signals.samples_per_step / signals.queue_full_reading


def _full_cache(signals: Signals) -> float:
    """How much of the time the fullest replica's cache is full, 0 to 1, where that is what holds requests up."""
    if signals.kv_cache_usage is None or not is_crowded(signals):
        return 0.0
    return _ramp(signals.kv_cache_usage, FULL_CACHE, 1.0)


def _ahead(signals: Signals) -> float:
    """How far generation is ahead of the trainer, 0 to 1: by what lies in the queue, or held back in front of it."""
    return 1.0 - (1.0 - _lying_ready(signals)) * (1.0 - _kept_waiting(signals))


def _lying_ready(signals: Signals) -> float:
    """How far generation is ahead by what lies in the queue, 0 to 1."""
    if signals.queue_fill is None:
        return UNKNOWN_AHEAD
    full = _ramp(signals.queue_fill, NOTHING_AHEAD, WHOLLY_AHEAD)
    if signals.queue_size is None or not signals.samples_per_step:
        return full
    steps = (signals.queue_size / signals.samples_per_step) ** AHEAD_POWER
    by_steps: float = steps / (steps + HALF_AHEAD_STEPS**AHEAD_POWER)
    return by_steps if signals.blocked_steps is not None else max(by_steps, full)


def _kept_waiting(signals: Signals) -> float:
    """How much of its time generation does without what it could make, for want of room in the queue, 0 to 1."""
    blocked = signals.blocked_steps or 0.0
    held = blocked * ((signals.backpressure_s or 0.0) / signals.step_s if signals.step_s else 0.0)
    spare = signals.dropped_per_trained or 0.0
    return max(
        _ramp(blocked, OFTEN_BLOCKED, 1.0),
        _ramp(min(blocked, held), BRIEFLY_HELD, LONG_HELD),
        _ramp(spare, FLUSHED, MANY_SPARE) if held_back(signals) else 0.0,
    )


def _ramp(value: float, nothing: float, all_of_it: float) -> float:
    return min(1.0, max(0.0, (value - nothing) / (all_of_it - nothing)))
