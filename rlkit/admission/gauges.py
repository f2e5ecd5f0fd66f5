"""What the rollout worker adds to TRL's metrics, real or simulated. Pure.

No gauge's name has `max` or `min` in it, and only a count has `total`: TRL reduces a step's values by these words.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.admission.law import Decision

# What a decision is called in TRL's metrics; preemptions under a name with `total`, which TRL adds up over a step.
GAUGES = {
    "rollout/inflight_cap": "cap",
    "rollout/inflight_admitted": "in_flight",
    "rollout/gate_held": "held",
    "rollout/kv_cache_usage": "usage",
    "rollout/vllm_running_requests": "running",
    "rollout/vllm_queued_requests": "waiting",
    "rollout/vllm_preemptions_total": "preemptions",
    "rollout/replica_speed_spread": "speed_spread",
    "rollout/replica_load_spread": "load_spread",
}

# A percentile that says something of now, and of more than one group.
RECENT_ROLLOUTS = 256
PERCENTILE = 0.95


def gauges(decision: Decision) -> dict[str, float]:
    """A decision as TRL's metrics; what is unknown is left out."""
    values = {name: getattr(decision, field) for name, field in GAUGES.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def percentiles(recent: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The 95th percentiles of (seconds from admission, seconds with the gate) as TRL's metrics; none of no rollouts."""
    if not recent:
        return {}
    return {
        "rollout/duration_p95_s": _percentile([dispatched for dispatched, _ in recent]),
        "rollout/duration_with_gate_p95_s": _percentile([whole for _, whole in recent]),
    }


def _percentile(values: list[float]) -> float:
    # numpy's rule, without its last digits, which differ between machines: a simulation is the same everywhere.
    values.sort()
    position = PERCENTILE * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)
