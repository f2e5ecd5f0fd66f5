"""How the requests to a replica end, and when it is taken out of service because it does not answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["completed", "refused", "failed", "cancelled"]

# One refused connection can be a restart of a socket or a full backlog; three in a row without a success are not.
MAX_FAILURES = 3


class ReplicaHealth:
    """Consecutive failures per replica: connections that failed or broke, and answers from 500 up.

    A 4xx is the client's mistake and counts as a success. A replica that fails fast would otherwise look like the least
    loaded one and draw all traffic.
    """

    def __init__(self, replicas: int, max_failures: int = MAX_FAILURES) -> None:
        self._failures = [0] * replicas
        self._max_failures = max_failures

    def answered(self, replica: int, status: int) -> bool:
        """A complete answer came; True when the replica has to go now."""
        if status >= 500:
            return self.failed(replica)
        self._failures[replica] = 0
        return False

    def failed(self, replica: int) -> bool:
        """No answer came, or a broken one; True when the replica has to go now."""
        self._failures[replica] += 1
        return self._failures[replica] == self._max_failures

    def recovered(self, replica: int) -> None:
        """It is back; the count starts over."""
        self._failures[replica] = 0


@dataclass
class Outcomes:
    """How the requests to one replica ended; those in flight have not yet.

    completed: answered below 400, to the end. refused: 4xx. failed: 5xx, no answer, or one that broke off. cancelled:
    the client went away first.
    """

    completed: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0

    def count(self, outcome: Outcome) -> None:
        """One more request has ended."""
        setattr(self, outcome, getattr(self, outcome) + 1)
