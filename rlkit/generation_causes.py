"""Why generation, or the scoring of what was generated, is the slower side."""

from __future__ import annotations

from rlkit.cause import Cause
from rlkit.decoding import fixed_share
from rlkit.judgement import PINNED
from rlkit.recipe import Recipe
from rlkit.replica_causes import slow_replica_cause, unbalanced_cause
from rlkit.signals import Signals
from rlkit.sizing import more_in_flight, queue_for, situation, slots
from rlkit.waste_causes import connection_cause, crowded_cause, dropped_cause, is_crowded
from rlkit.wording import percent

# A replica that may hold less than half of the sequences it has slots for is idle on the client's account: decoding is
# bound by memory bandwidth, more sequences in a step cost little. Published: 43 for each replica, then 128.
IDLE_SLOTS = 0.5

# A tenth more rollouts in flight pays more than a tenth more replicas while more than half of an iteration is the same
# for one sequence as for all of them.
MOSTLY_FIXED = 0.5


def generation_causes(signals: Signals, recipe: Recipe | None) -> list[Cause]:
    """Always at least one."""
    found: list[Cause] = []
    dropped, connections = dropped_cause(signals, recipe), connection_cause(signals, recipe)
    limited = recipe is not None and _client_limits(signals, recipe)
    slow, uneven = slow_replica_cause(signals, recipe), unbalanced_cause(signals, recipe)
    if slow is not None:
        found.append(slow)
    if uneven is not None:
        found.append(uneven)
    if is_crowded(signals):
        found.append(crowded_cause(signals, recipe))
    elif connections is not None:
        found.append(connections)
    elif limited and recipe is not None and (dropped is None or fixed_share(signals, recipe) is not None):
        # Where decoding is known to be mostly fixed time, more at once are hardly slower: what is dropped is dropped
        # because there is too little, too late.
        found.append(_raise_limit(signals, recipe))
    elif dropped is not None:
        found.append(dropped)
    return [*found, _replicas(signals, recipe)]


def scoring_cause(signals: Signals, recipe: Recipe | None) -> Cause:
    """A reward that cannot keep up."""
    field = "reward" if recipe is None else f"reward ({recipe.reward})"
    if signals.score_blocked_steps:
        text = f"scoring: groups waited for the reward in {percent(signals.score_blocked_steps)} of the steps"
    else:
        text = f"scoring: a group is being scored {percent(min(1.0, signals.score_busy or 0.0))} of the time"
    return Cause(
        name="scoring",
        text=text,
        next_action=f"Make the {field} faster: it cannot keep up with generation.",
        seconds=signals.rollout_wait_s,
        alone=True,
    )


def _replicas(signals: Signals, recipe: Recipe | None) -> Cause:
    if recipe is not None and recipe.engine == "local":
        return Cause(
            name="replicas",
            text="the replicas' generation rate",
            next_action="Take more machines (engine: hf), or raise rollout.max_inflight_tasks while the cache has "
            "room: further replicas on this machine would share its cores.",
            seconds=signals.rollout_wait_s,
        )
    more = "" if recipe is None else f" from {recipe.serve.replicas} to {recipe.serve.replicas + 1}"
    alternative = ", or rollout.max_inflight_tasks while they have cache to spare"
    return Cause(
        name="replicas",
        text="the replicas' generation rate",
        next_action=f"Raise serve.replicas{more}{alternative}.",
        seconds=signals.rollout_wait_s,
        alternative=alternative,
    )


def _client_limits(signals: Signals, recipe: Recipe) -> bool:
    limit = recipe.inflight_limit
    occupied = signals.admitted if signals.admitted is not None else signals.inflight
    if occupied is None or occupied < PINNED * limit:
        return False
    capped = recipe.cap.policy != "none" and (signals.inflight_cap is None or signals.inflight_cap < PINNED * limit)
    if capped and signals.admitted is None:
        return False  # the gauge still reads the limit, but the cap decides
    fixed = fixed_share(signals, recipe)
    if fixed is not None:
        return fixed > MOSTLY_FIXED
    now, most = situation(recipe, signals), slots(recipe)
    in_time = most if now is None else min(most, now.window)  # more would only be thrown away
    return limit < in_time and limit <= IDLE_SLOTS * most


def _raise_limit(signals: Signals, recipe: Recipe) -> Cause:
    limit, engines = recipe.inflight_limit, recipe.serve.engines
    now = situation(recipe, signals)
    target = None if now is None else more_in_flight(now)
    if now is None or target is None:
        action = f"Raise rollout.max_inflight_tasks above {limit}, with serve.max_num_seqs where it is set"
    else:
        action = f"Raise rollout.max_inflight_tasks from {limit} to {target}"
        queue, queue_now = queue_for(now, target), recipe.rollout.queue_maxsize
        if queue != queue_now:
            action += f" and rollout.queue_maxsize from {queue_now} to {queue}"
    shared = f" for {engines} replicas: {limit / engines:,.0f} each" if engines > 1 else ""
    return Cause(
        name="client-limit",
        text=f"the client's in-flight limit (rollout.max_inflight_tasks {limit}{shared})",
        next_action=f"{action}.",
        seconds=signals.rollout_wait_s,
        alone=True,
    )
