"""What a law of the admission cap sees and answers. Pure: readings come in, a cap and its reason go out.

Unknown is not zero: whatever a server did not say is None, in a reading as in a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

Policy = Literal["none", "published", "rlkit"]

Reason = Literal[
    "fixed",  # no law: the ceiling
    "unmetered",  # no server has ever had readable metrics: the ceiling
    "sized",  # the first cap, from what the caches hold
    "resized",  # a replica joined or left
    "blind",  # nothing readable this time: the last cap
    "cut",
    "latched",  # cut, and still more in flight than the cap
    "grown",
    "held",  # nothing to change
    "asked",  # a person asked for fewer than the law allows
]

# Readings without a number after which the servers count as ones that have none: a proxy whose replicas are just
# coming into service answers within two.
UNMETERED_AFTER = 3


@dataclass(frozen=True)
class ReplicaState:
    """One replica at one reading; over several `engines` (data parallelism) the worst usage and the sums.

    `usage` is the fraction of the KV cache in use (0..1), `waiting` counts requests of all reasons,
    `waiting_for_capacity` those that wait for KV blocks. `preemptions` counts since the previous reading; None on the
    first one and after a restart. `capacity_tokens` is what the KV cache holds. `restarted`: the server's counters
    began anew since the previous reading. `tokens_each` of its running requests gets from one reading to the next,
    over the last readings.
    """

    usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_for_capacity: int | None = None
    preemptions: int | None = None
    capacity_tokens: int | None = None
    restarted: bool = False
    engines: int = 1
    tokens_each: float | None = None


@dataclass(frozen=True)
class Reading:
    """All replicas at one time (seconds), and the gate.

    A replica that could not be read this time is None. `in_flight` rollouts are admitted, `held` wait at the gate,
    `completed` have ended since the previous reading.
    """

    time: float
    replicas: Mapping[str, ReplicaState | None]
    in_flight: int
    held: int
    completed: int

    @property
    def readable(self) -> dict[str, ReplicaState]:
        """The replicas that could be read this time."""
        return {name: state for name, state in self.replicas.items() if state is not None}


@dataclass(frozen=True)
class Decision:
    """The cap from now on, why (a code, and a sentence with its numbers), and what was seen.

    `usage` is the highest of the replicas, `running`, `waiting` and `preemptions` are their sums; None when no replica
    said it. The spreads say how unlike the replicas are (rlkit.admission.spread).
    """

    time: float
    cap: int
    reason: Reason
    text: str
    in_flight: int
    held: int
    usage: float | None
    running: int | None
    waiting: int | None
    preemptions: int | None
    speed_spread: float | None = None
    load_spread: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain JSON types, one line of the trace."""
        return asdict(self)


class Law(Protocol):
    """A law of the admission cap: observe once before the first rollout is admitted, then every `poll_s` seconds."""

    poll_s: float

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight from now on: at least 1, at most the ceiling."""

    def observe(self, reading: Reading) -> Decision:
        """Take a reading, not older than the one before; raises nothing."""


def decide(reading: Reading, cap: int, reason: Reason, text: str) -> Decision:
    """The decision that follows a reading."""
    # Imported here: it is written in this module's terms.
    from rlkit.admission.spread import load_spread, speed_spread

    states = list(reading.readable.values())
    everybody = states if len(states) == len(reading.replicas) else []
    usages = [state.usage for state in states if state.usage is not None]
    return Decision(
        time=reading.time,
        cap=cap,
        reason=reason,
        text=text,
        in_flight=reading.in_flight,
        held=reading.held,
        usage=max(usages) if usages else None,
        running=known_sum(state.running for state in states),
        waiting=known_sum(state.waiting for state in states),
        preemptions=known_sum(state.preemptions for state in states),
        speed_spread=speed_spread(everybody),
        load_spread=load_spread(everybody),
    )


def at_most(decision: Decision, most: int | None) -> Decision:
    """The decision under a limit that a person set while the run goes on; None: none is set.

    The law's own estimate goes on beneath it, so that the law's cap is in force again once the limit is lifted.

    >>> calm = Decision(0.0, 40, "held", "40 may be in flight.", 40, 8, 0.6, 38, 0, 0)
    >>> at_most(calm, 16).cap, at_most(calm, 16).reason, at_most(calm, 64) == calm
    (16, 'asked', True)
    """
    if most is None or most >= decision.cap:
        return decision
    text = f"{most} may be in flight, as asked; the law would allow {decision.cap}."
    return replace(decision, cap=max(1, most), reason="asked", text=text)


def known_sum(counts: Iterable[int | None]) -> int | None:
    """The sum of what is known; None when nothing is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class FixedCap:
    """No law: the ceiling, whatever the servers say."""

    # Read all the same, for the metrics that show what the limit does to the servers.
    poll_s = 5.0

    def __init__(self, ceiling: int) -> None:
        self.cap = ceiling

    def observe(self, reading: Reading) -> Decision:
        """Take a reading; nothing follows from it."""
        return decide(reading, self.cap, "fixed", f"{self.cap} may be in flight; no law is in force.")


def make_law(policy: Policy, *, ceiling: int, max_model_len: int) -> Law:
    """The law of a policy.

    `ceiling` is max_inflight_tasks, `max_model_len` the most tokens one sequence can have.
    """
    # Imported here: the laws are written in this module's terms.
    from rlkit.admission.adaptive import AdaptiveLaw
    from rlkit.admission.published import PublishedLaw

    match policy:
        case "none":
            return FixedCap(ceiling)
        case "published":
            return PublishedLaw(ceiling=ceiling, max_model_len=max_model_len)
        case "rlkit":
            return AdaptiveLaw(ceiling=ceiling, max_model_len=max_model_len)
