"""Rollouts that are made in vain or held up on the way, whichever side bounds the run."""

from __future__ import annotations

from rlkit.cause import Cause
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.sizing import queue_in_time, situation
from rlkit.wording import number, percent

# One sample thrown away for every ten trained: generation that buys nothing. The published run without a cap threw 34 %
# away, those with one none.
MANY_DROPPED = 0.1

# Preemptions per sample, without those of a sync that clears the cache. Published without a cap: 501,678 and 436,774
# over 38,400 samples; with one no more than its syncs cause.
MANY_PREEMPTIONS = 0.5

# Requests that wait inside the servers for each that runs: a cache that fits everybody leaves none waiting.
MANY_WAITING = 0.1

# Above it requests are preempted for one another's blocks; while some wait as well, one more only waits longer.
FULL_CACHE = 0.9

# Rollouts of average length that are ready in half of the allowed versions are in time: only long ones are late.
AVERAGE_IN_TIME = 0.5

# Admitted requests that neither run nor wait in a server have not arrived there: a pool of connections is too small
# when that is so in every step. In some it is so without one: short rollouts spend much of their time on the way, and a
# sync holds all of them up.
ARRIVED = 0.85

# A pool of connections holds as many in every step: in 99 of 100 simulated runs that lacked some the average was 0.98
# of the most. On a machine that is out of breath what arrives goes up and down.
ALWAYS_AS_MANY = 0.9


def waste_causes(signals: Signals, recipe: Recipe | None) -> list[Cause]:
    """Those that the log shows; often none."""
    found = [crowded_cause(signals, recipe)] if is_crowded(signals) else []
    others = (None if found else dropped_cause(signals, recipe), connection_cause(signals, recipe))
    return found + [cause for cause in others if cause is not None]


def is_crowded(signals: Signals) -> bool:
    """More rollouts in the servers than their KV cache has room for."""
    if signals.preemptions_per_sample is not None and signals.preemptions_per_sample >= MANY_PREEMPTIONS:
        return True
    usage, waiting = signals.kv_cache_usage, signals.vllm_waiting
    if usage is None or waiting is None:
        return False
    return usage >= FULL_CACHE and waiting >= max(1.0, MANY_WAITING * (signals.vllm_running or 0.0))


def crowded_cause(signals: Signals, recipe: Recipe | None) -> Cause:
    """Over-admission, and its two remedies."""
    said = []
    if signals.kv_cache_usage is not None:
        said.append(f"{percent(signals.kv_cache_usage)} in use")
    if signals.vllm_waiting:
        said.append(f"{number(signals.vllm_waiting)} requests wait in the servers")
    if signals.preemptions_per_sample:
        said.append(f"{number(signals.preemptions_per_sample)} preemptions for each sample")
    if signals.dropped_per_trained is not None and signals.dropped_per_trained >= MANY_DROPPED:
        said.append(f"{_dropped_words(signals.dropped_per_trained)} are thrown away as stale")
    capped = recipe is not None and recipe.cap.policy != "none"
    give = "Give" if capped else f"Admit what fits ({_fewer(signals)}), or give"
    return Cause(
        name="over-admission",
        text=f"full KV caches ({', '.join(said)})",
        next_action=f"{give} the replicas more cache: serve.replicas, or serve.kv_cache_gib.",
        seconds=signals.rollout_wait_s,
        alone=True,
    )


def dropped_cause(signals: Signals, recipe: Recipe | None) -> Cause | None:
    """Samples that are too old when the trainer comes to them: a queue, or a limit, beyond the staleness window."""
    dropped = signals.dropped_per_trained
    if dropped is None or dropped < MANY_DROPPED:
        return None
    seconds = None if signals.step_s is None else signals.step_s * dropped / (1 + dropped)
    now = None if recipe is None or signals.samples_per_step is None else situation(recipe, signals)
    if recipe is not None and now is not None and signals.queue_size is not None:
        window = queue_in_time(now)
        if window is not None and signals.queue_size > window / 2:
            size = recipe.rollout.queue_maxsize
            return Cause(
                name="queue",
                text=f"a queue larger than what is trained on in time ({size:,} samples, {number(window)} are; "
                f"{_dropped_words(dropped)} are thrown away)",
                next_action=f"Lower rollout.queue_maxsize from {size} to {window}.",
                seconds=seconds,
            )
    tail, versions = signals.length_tail, signals.rollout_versions
    if recipe is not None and tail is not None and versions is not None:
        allowed = recipe.rollout.max_staleness
        if versions < allowed * AVERAGE_IN_TIME and versions * tail > allowed:
            return Cause(
                name="long-tail",
                text=f"long-tail completions (the longest take {number(versions * tail)} versions, an average one "
                f"{number(versions)}, and {allowed} are allowed; {_dropped_words(dropped)} are thrown away)",
                next_action=f"Lower sampling.max_completion_length ({recipe.sampling.max_completion_length} now), or "
                "raise rollout.max_staleness with serve.max_loras.",
                seconds=seconds,
                alone=True,
            )
    return Cause(
        name="stale",
        text=f"samples thrown away as stale ({number(100 * dropped)} for every 100 trained on)",
        next_action="Admit fewer rollouts at once, so that they are finished before they are stale: "
        f"{_fewer(signals)}.",
        seconds=seconds,
        alone=True,
    )


def connection_cause(signals: Signals, recipe: Recipe | None) -> Cause | None:
    """Requests that were admitted and never reach a server at once."""
    admitted = signals.admitted
    if admitted is None and recipe is not None and recipe.cap.policy == "none":
        admitted = signals.inflight
    if admitted is None or signals.vllm_running is None or signals.vllm_waiting is None:
        return None
    arrived = signals.vllm_running + signals.vllm_waiting
    most = signals.arrived_most
    if most is None or most >= ARRIVED * admitted or admitted - arrived < 2 or arrived < ALWAYS_AS_MANY * most:
        return None
    return Cause(
        name="connections",
        text=f"a connection limit ({number(arrived)} of {number(admitted)} admitted rollouts are in the servers)",
        next_action="Let the client and the proxy open as many connections as rollout.max_inflight_tasks "
        f"{number(admitted)}, and see whether serve.max_num_seqs holds requests back.",
        seconds=signals.rollout_wait_s,
        alone=True,
    )


def _dropped_words(dropped: float) -> str:
    return f"{number(100 * dropped)} samples for every 100 trained on"


def _fewer(signals: Signals) -> str:
    now = "" if signals.inflight_limit is None else f" ({number(signals.inflight_limit)} now)"
    return f"cap.policy=rlkit, or a lower rollout.max_inflight_tasks{now}"
