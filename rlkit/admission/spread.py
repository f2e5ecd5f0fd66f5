"""How unlike the replicas are: in what each has to do, and in how fast it does it. Pure.

A router that sends each rollout to whoever has fewest in flight keeps the numbers alike, whatever a replica's speed: a
slow one shows in the tokens that each of its requests gets, not in how many it has.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from rlkit.admission.law import ReplicaState

# A reading's running requests are those of a moment: a few of them come and go between two. Two minutes of readings
# tell a slow replica from a lucky one, and still forget one that was slow once.
RECENT_READINGS = 24


class SpeedMeter:
    """Tokens that a running request of each replica gets from one reading to the next, over the last readings."""

    def __init__(self) -> None:
        self._recent: defaultdict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=RECENT_READINGS))

    def note(self, replica: str, generated: int | None, before: int | None, now: int | None) -> float | None:
        """Tokens each, with this reading: `generated` since the one before it, `before` and `now` ran then.

        None when nobody can say, or none ran.
        """
        recent = self._recent[replica]
        if generated is not None and before is not None and now is not None and generated >= 0:
            recent.append((generated, (before + now) / 2))
        running = sum(ran for _, ran in recent)
        return sum(tokens for tokens, _ in recent) / running if running else None


def speed_spread(states: Sequence[ReplicaState]) -> float | None:
    """By which part the slowest replica gives its requests fewer tokens than the others do on average: 0 for alike.

    None for a single replica, and where one did not say, had nothing to do, or all of them stood still.
    """
    speeds = sorted(state.tokens_each for state in states if state.tokens_each is not None)
    if len(speeds) < 2 or len(speeds) < len(states) or not speeds[-1]:
        return None
    others = speeds[1:]
    return 1.0 - speeds[0] * len(others) / sum(others)


def load_spread(states: Sequence[ReplicaState]) -> float | None:
    """Requests of the busiest replica less those of the idlest, over the mean: 0 for alike. None as above."""
    loads = [
        state.running + state.waiting for state in states if state.running is not None and state.waiting is not None
    ]
    if len(loads) < 2 or len(loads) < len(states) or not sum(loads):
        return None
    return (max(loads) - min(loads)) * len(loads) / sum(loads)
