"""Whether the reward is what generation waits for, from the signals alone."""

from __future__ import annotations

from rlkit.leverage import NO_WAIT, held_back
from rlkit.signals import Signals
from rlkit.wording import percent

# A reward that is being computed for this much of the time cannot do more: one group is scored at a time.
SCORING_BUSY = 0.85

# While the score loop waits for room in a full queue it scores nothing, so that a slow reward may be busy for less of
# the time; a line of groups in front of it still tells. In simulated runs it was ten groups and more, or none.
SCORING_OFTEN = 0.6
GROUPS_IN_LINE = 4.0

# One group is scored at a time; more than this much of the time is another unit, or another run's figure.
IMPOSSIBLE_BUSY = 1.5

# Groups that wait to be scored in most of the steps, where it is not known for how long one is.
SCORES_MOSTLY_BLOCKED = 0.5


def scores_all_the_time(signals: Signals) -> bool:
    """Whether generation waits for the reward: it is hardly ever idle, or has a line of groups in front of it."""
    if signals.score_busy is not None:
        if signals.score_busy > IMPOSSIBLE_BUSY:
            return False
        waits, line = (signals.wait_share or 0.0) >= NO_WAIT, signals.score_wait_s or 0.0
        queues = line >= GROUPS_IN_LINE * (signals.score_s or 0.0) > 0 and not held_back(signals)
        return waits and signals.score_busy >= (SCORING_OFTEN if queues else SCORING_BUSY)
    return (signals.score_blocked_steps or 0.0) >= SCORES_MOSTLY_BLOCKED and not signals.blocked_steps


def outlasts_a_step(signals: Signals) -> bool:
    """Whether groups wait for the reward longer than a step takes, the sync that stops generation included.

    A line that a sync works off is one that generation made in a burst; one in front of a reward that is not always
    being computed waits for room in the queue.
    """
    step, wait = signals.step_s, signals.score_wait_s
    if signals.score_busy is None or signals.score_busy < SCORING_BUSY:
        return False
    return step is not None and wait is not None and wait >= step


def scoring_words(signals: Signals) -> str:
    """`a group is being scored 97 % of the time`."""
    if signals.score_busy is not None:
        return f"a group is being scored {percent(min(1.0, signals.score_busy))} of the time"
    return f"groups wait for the reward in {percent(signals.score_blocked_steps or 0.0)} of the steps"
