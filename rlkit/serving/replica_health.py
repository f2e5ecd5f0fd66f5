"""How the requests to a replica end, when it is taken out of service, and when it may come back. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "refused", "failed", "cancelled"]

# One refused connection can be a restart of a socket or a full backlog; three in a row without a success are not.
MAX_FAILURES = 3

# A replica that fails every other request never fails three times in a row for long, yet it looks the least loaded and
# draws more than its share: half of the last 32 is too much.
WINDOW = 32

# A replica that is back and fails again within a minute was not well: it is left alone for a second, then for twice as
# long each time, up to a minute.
STEADY_S = 60.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass
class _State:
    in_a_row: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # True: failed
    failed: int = 0  # of the recent ones
    back_since: float | None = None
    wait_s: float = 0.0
    not_before: float = 0.0


class ReplicaHealth:
    """Failures per replica: connections that failed or broke, and answers from 500 up.

    A 4xx is the client's mistake and counts as a success. A replica that fails fast would otherwise look like the least
    loaded one and draw all traffic. `now` is in seconds on any clock.
    """

    def __init__(self, replicas: int, max_failures: int = MAX_FAILURES) -> None:
        self._states = [_State() for _ in range(replicas)]
        self._max_failures = max_failures

    def answered(self, replica: int, status: int) -> bool:
        """A complete answer came; True when the replica has to go."""
        if status >= 500:
            return self.failed(replica)
        state = self._states[replica]
        state.in_a_row = 0
        if state.failed:
            _note(state, failed=False)
        return False

    def failed(self, replica: int) -> bool:
        """No answer came, or a broken one; True when the replica has to go."""
        state = self._states[replica]
        state.in_a_row += 1
        _note(state, failed=True)
        return state.in_a_row >= self._max_failures or 2 * state.failed >= WINDOW

    def went(self, replica: int, now: float) -> None:
        """It was taken out of service."""
        state = self._states[replica]
        was_steady = state.back_since is None or now - state.back_since >= STEADY_S
        state.wait_s = 0.0 if was_steady else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * state.wait_s))
        state.not_before = now + state.wait_s

    def may_return(self, replica: int, now: float) -> bool:
        """Whether it has been left alone for long enough."""
        return now >= self._states[replica].not_before

    def recovered(self, replica: int, now: float) -> None:
        """It is back; the count starts over."""
        state = self._states[replica]
        state.in_a_row = state.failed = 0
        state.recent.clear()
        state.back_since = now


def _note(state: _State, *, failed: bool) -> None:
    if len(state.recent) == WINDOW:
        state.failed -= state.recent[0]
    state.recent.append(failed)
    state.failed += failed


@dataclass
class Outcomes:
    """How the requests to one replica ended; those in flight have not yet.

    completed: answered below 400, to the end. refused: 4xx. failed: 5xx, no answer, one that broke off, or one that was
    sent to another replica instead. cancelled: the client went away first.
    """

    completed: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0

    def count(self, outcome: Outcome) -> None:
        """One more request has ended."""
        setattr(self, outcome, getattr(self, outcome) + 1)
