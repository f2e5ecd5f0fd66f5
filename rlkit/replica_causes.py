"""A replica that is unlike the others: slower, or with more to do than its cache holds."""

from __future__ import annotations

import math

from rlkit.cause import Cause
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.waste_causes import is_crowded
from rlkit.wording import percent

# Restoring a slow replica is named before anything else once it gains more than a tenth more of everything else would.
SLOW_REPLICA_GAIN = 0.1

# Requests of each replica below which their comings and goings make replicas look unlike: simulated ones that were
# alike and had two each looked a third apart.
ENOUGH_EACH = 4

# A replica's speed is a mean over its requests: alike ones look unlike by this over the root of how many each has
# (simulated: 4 each by 10 %, 8 by 13 %, 12 by 11 %).
CHANCE_GAIN = 0.4

# Fewer replicas cannot be unlike each other; taken when the recipe is not known.
FEWEST_REPLICAS = 2

# Between the busiest and the idlest replica lies half the mean: beyond what groups of eight make of a fair share.
UNEVEN_LOAD = 0.5


def slow_replica_gain(signals: Signals, recipe: Recipe | None) -> float | None:
    """The part by which all replicas together would generate more if the slowest were like the others.

    Everybody has as many requests, so that a replica's part is its speed: with one of n at f of the others' speed, all
    together have n - 1 + f of n. None where it is not known.
    """
    if signals.replica_speed_spread is None:
        return None
    replicas = FEWEST_REPLICAS if recipe is None else recipe.serve.replicas
    speed = 1.0 - min(1.0, signals.replica_speed_spread)
    return (1.0 - speed) / (replicas - 1 + speed) if replicas > 1 else None


def slow_replica_cause(signals: Signals, recipe: Recipe | None) -> Cause | None:
    """One that is slower by so much that nothing else is worth doing first.

    None for replicas that share one machine (engine: local): what one of them is short of, the others have.
    """
    if recipe is not None and recipe.engine == "local":
        return None
    gain = slow_replica_gain(signals, recipe)
    replicas = FEWEST_REPLICAS if recipe is None else recipe.serve.replicas
    if gain is None or gain < SLOW_REPLICA_GAIN:
        return None
    if signals.vllm_running is not None:
        each = signals.vllm_running / replicas
        if each < ENOUGH_EACH or gain < CHANCE_GAIN / math.sqrt(each):
            return None
    generating = None if signals.step_s is None else signals.step_s * (1.0 - (signals.sync_share or 0.0))
    seconds = None if generating is None else generating * gain / (1.0 + gain)
    if seconds is not None and signals.rollout_wait_s is not None:
        seconds = min(seconds, signals.rollout_wait_s)
    return Cause(
        name="slow-replica",
        text=f"a slow replica (each of its requests gets {percent(signals.replica_speed_spread or 0.0)} fewer tokens "
        "than those of the others)",
        next_action="Find the slow replica (the proxy's /metrics has every replica under its number) and start it on "
        f"another machine, or lower serve.replicas without it; alike, they would generate {percent(gain)} more.",
        seconds=seconds,
        alone=True,
    )


def unbalanced_cause(signals: Signals, recipe: Recipe | None) -> Cause | None:
    """Requests that wait for the cache of one replica while another has few."""
    spread = signals.replica_load_spread
    if spread is None or spread < UNEVEN_LOAD or not is_crowded(signals):
        return None
    threshold = "" if recipe is None else f" ({recipe.routing.spill_threshold} now)"
    return Cause(
        name="unbalanced",
        text=f"unevenly loaded replicas (the busiest has {percent(spread)} of the mean more requests than the "
        "idlest, and some wait)",
        next_action=f"Lower routing.spill_threshold{threshold}, so that rollouts leave a busy replica earlier.",
        seconds=signals.rollout_wait_s,
        alone=True,
    )
