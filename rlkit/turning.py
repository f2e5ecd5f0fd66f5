"""What would turn a verdict into another one, and which signals contradict each other."""

from __future__ import annotations

from rlkit.judgement import (
    BRIM,
    LONG_WAIT,
    Judgement,
    queue_state,
    queue_words,
    wait_words,
)
from rlkit.leverage import (
    AHEAD_POWER,
    FETCHING,
    FULL,
    HALF_AHEAD_STEPS,
    LEAST_LEVERAGE,
    NO_WAIT,
    SAVED_OF_WAIT,
    TENTH_FASTER,
    held_back,
)
from rlkit.scoring import IMPOSSIBLE_BUSY, SCORING_BUSY
from rlkit.signals import TIMER_SLACK, Signals
from rlkit.wording import percent

# Requests inside the servers cannot be more than were admitted, but for the moment between two readings.
READING_SLACK = 1.1

# Where a side's leverage (rlkit.leverage) comes to LEAST_LEVERAGE: a trainer that is all of the step with this many
# steps' samples in the queue, and generation with a wait of this part of the step, beyond fetching.
FEW_STEPS = HALF_AHEAD_STEPS * (LEAST_LEVERAGE / (1 - LEAST_LEVERAGE)) ** (1 / AHEAD_POWER)
SHORT_WAIT = LEAST_LEVERAGE * TENTH_FASTER / SAVED_OF_WAIT


def would_change(judgement: Judgement, signals: Signals) -> str:
    """One sentence with the thresholds."""
    match judgement.bound:
        case "trainer":
            return (
                f"It would be another verdict if the queue held less than {_samples(FEW_STEPS, signals)} "
                "and finished rollouts were not held back, or the weight sync took longer than computing."
            )
        case "generation":
            return (
                f"It would be another verdict if the trainer waited for less than {percent(SHORT_WAIT)} of the step, "
                f"or a group were scored for over {percent(SCORING_BUSY)} of the time."
            )
        case "sync":
            return (
                "It would be another verdict if the weight sync took less time than computing or generation, whichever "
                "the other one waits for."
            )
        case "scoring":
            return (
                f"It would be generation's if a group were scored for less than {percent(SCORING_BUSY)} of the time "
                "while the trainer waits."
            )
        case "balanced":
            return (
                f"It would be generation's with a wait of over {percent(SHORT_WAIT + FETCHING)} of the step, and the "
                f"trainer's with more than {_samples(HALF_AHEAD_STEPS, signals)} in the queue."
            )
        case "stalled":
            return "It would be another verdict as soon as steps are logged again at their usual pace."
        case _:
            return judgement.way_out


def _samples(steps: float, signals: Signals) -> str:
    """`1.8 steps' samples (116)`."""
    count = f" ({steps * signals.samples_per_step:,.0f})" if signals.samples_per_step else ""
    return f"{steps:.1f} steps' samples{count}"


def contradictions(signals: Signals) -> list[str]:
    """A sentence for each pair of signals that cannot both be true of one run."""
    found = []
    wait, fill = signals.wait_share, signals.queue_fill
    waits_and_full = wait is not None and fill is not None and wait >= NO_WAIT and fill >= FULL
    if waits_and_full and ((fill or 0.0) >= BRIM or (wait or 0.0) >= LONG_WAIT):
        found.append(f"{_capital(queue_words(signals))}, and yet {wait_words(signals)}.")
    elif wait is not None and wait >= LONG_WAIT and held_back(signals) and queue_state(signals) != "empty":
        blocked = percent(signals.blocked_steps or 0.0)
        found.append(f"Finished rollouts are held back in {blocked} of the steps, and yet {wait_words(signals)}.")
    excess = signals.phases_over_step
    if excess is not None and excess > TIMER_SLACK:
        found.append(f"The phases add up to {percent(excess)} of perf/step_s.")
    size, most = signals.queue_size, signals.queue_maxsize
    if size is not None and most is not None and size > most:
        found.append(f"The queue holds {size:,.0f} samples, and rollout.queue_maxsize allows {most:,.0f}.")
    busy = signals.score_busy
    if busy is not None and busy > IMPOSSIBLE_BUSY:
        found.append(f"Groups are scored for {percent(busy)} of the time, and only one is at a time.")
    running, admitted = signals.vllm_running, signals.admitted
    if running is not None and admitted is not None and running > READING_SLACK * admitted + 1:
        found.append(f"The servers run {running:,.0f} requests, and {admitted:,.0f} rollouts are admitted.")
    return found


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
