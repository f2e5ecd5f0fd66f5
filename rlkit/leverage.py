"""How much of a run's speed hangs on each side: what part of the step follows a side's own speed. Pure.

A side of leverage 0.5 that gets 1 % faster makes the step 0.5 % shorter. Trainer and generation share what the weight
sync, which stops both, leaves; whoever the other one waits for has it. The rules were read off interventions on
simulated runs whose sides are about as fast as each other (rlkit.evaluation).
"""

from __future__ import annotations

from rlkit.signals import Signals

# A trainer that waits for less than this is not short of samples. Published trainer-bound runs wait for under 1 % of
# the step, a real one on two cores for 1 %; fetching a ready sample is never quite free.
NO_WAIT = 0.05

# The experiment behind a label: a tenth faster takes this part off what follows it.
TENTH_FASTER = 1 - 1 / 1.1

# Generation that is a tenth faster saves no more than the trainer waits, and of a wait that comes in bursts a little
# less than all.
SAVED_OF_WAIT = 0.85

# A trainer that waits for this part of the step beyond fetching has used up what generation is ahead of it: a faster
# one waits more. Simulated runs of equal sides: at 1.5 % little of the trainer's leverage is left, at 0.2 % nearly all.
CATCHES_UP = 0.018

# Fetching samples that are ready is never free; what every step waits, up to this part, is no want of samples. The
# published trainer-bound runs fetch in under 1 % of the step, real ones on two cores in 1 %.
FETCHING = 0.015

# A queue that stands lower than this is never ahead of the trainer by a step; one that stands this much higher is.
NOTHING_AHEAD = 0.1
WHOLLY_AHEAD = 0.5

# A side with less leverage gains less than 2 % when it gets a tenth faster: nothing in particular bounds the run.
LEAST_LEVERAGE = 0.02 / TENTH_FASTER

# Two sides that are as good as each other, and hardly better than that, do not bound a run either.
LITTLE_LEVERAGE = 0.025 / TENTH_FASTER

# Rollouts held back in most of the steps: generation is ahead of the trainer, whatever the queue's average. Real
# trainer-bound run: in all of them; generation-bound and learning runs: in none.
MOSTLY_BLOCKED = 0.5


# Samples thrown away as stale were waited for as well, but would have been thrown away if they had come faster: this
# many for each trained on, and from there on, make up to this part of the wait one that generation cannot shorten.
DISCOUNT_OF_DROPPED = 2.0
MOST_DISCOUNT = 0.3

# One sample thrown away for every ten trained on explains a trainer that waits in front of a full queue.
FLUSHED = 0.1

# A queue above this is full for practical purposes: stale samples are thrown out in batches, and a real trainer-bound
# run reads between 50 % and 107 % from step to step.
FULL = 0.6


def flushed(signals: Signals) -> bool:
    """Whether the trainer waits in front of a full queue because what is in it is too old."""
    # A queue that is used up within a step has no reading of its own; that rollouts are held back says it was full.
    full = signals.queue_fill is None or signals.queue_fill >= FULL
    return full and held_back(signals) and (signals.dropped_per_trained or 0.0) >= FLUSHED


def leverage(signals: Signals) -> dict[str, float] | None:
    """Of trainer, generation and sync, each 0 to 1; None where the step's parts are not known."""
    wait, sync = signals.wait_share, signals.sync_share or 0.0
    if signals.step_s is None or not signals.shares or wait is None:
        return None
    computing = signals.shares["forward_backward"] + signals.shares["optimizer"]
    other = signals.shares["other"]
    # What lies between the phases is the trainer's own, unless it is the larger part: then nobody knows whose it is.
    busy = computing + other if other < computing else other
    if flushed(signals):
        return {"trainer": busy, "generation": wait, "sync": sync}
    starved = wait - min(signals.least_wait_share or 0.0, FETCHING)
    in_vain = min(MOST_DISCOUNT, DISCOUNT_OF_DROPPED * (signals.dropped_per_trained or 0.0))
    return {
        "trainer": busy * _ahead(signals) * max(0.0, 1.0 - starved / CATCHES_UP),
        "generation": min(1.0 - sync, SAVED_OF_WAIT * starved * (1.0 - in_vain) / TENTH_FASTER),
        "sync": sync,
    }


def held_back(signals: Signals) -> bool:
    """Whether finished rollouts found the queue full in most of the steps."""
    return signals.blocked_steps is not None and signals.blocked_steps >= MOSTLY_BLOCKED


def _ahead(signals: Signals) -> float:
    """How far generation is ahead of the trainer, 0 to 1."""
    if held_back(signals):
        return 1.0
    if signals.queue_fill is None:
        return 0.5  # nobody knows
    return min(1.0, max(0.0, (signals.queue_fill - NOTHING_AHEAD) / (WHOLLY_AHEAD - NOTHING_AHEAD)))
