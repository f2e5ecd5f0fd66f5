"""What the adapter registry says: commands for the shell around it, and how loads ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# push: bring the files to the replica's own disk. discard: delete them there again.
Action = Literal["list", "unload", "reset", "push", "load", "pause", "resume", "discard"]


@dataclass(frozen=True)
class Send:
    """Ask one replica for something, and report the answer with the ticket. Seconds; the rest as needed.

    `serial` tells the weights of two loads of one name apart. `path` is the trainer's in a push, and in a load and a
    discard what the replica knows the files under.
    """

    ticket: int
    replica: int
    action: Action
    timeout_s: float
    name: str = ""
    path: str = ""
    serial: int = 0
    again: bool = False  # the adapter is live already: this replica gets back what the others have


@dataclass(frozen=True)
class SetRoutable:
    """Let requests go to a replica, or no longer."""

    replica: int
    routable: bool


@dataclass(frozen=True)
class Forget:
    """Nobody will ask for this adapter again (or not with the same weights): drop what is kept about it."""

    name: str


@dataclass(frozen=True)
class Abort:
    """End the requests that ask for this adapter, with an error: the name is about to mean other weights."""

    name: str


@dataclass(frozen=True)
class ReplicaReport:
    """One replica's part in a load.

    Load requests sent, whether it holds the adapter, its last refusal, and the seconds until it accepted.
    """

    attempts: int
    accepted: bool
    reason: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class OperationReport:
    """How a load or unload ended: `seconds` from the request to the end, `reason` when it failed.

    A failed load has been taken back from every replica that had accepted it. `timed_out` is one that failed only
    because its time was up; `refused` one that was not sent to any replica.
    """

    action: Literal["load", "unload"]
    name: str
    ok: bool
    seconds: float
    replicas: tuple[ReplicaReport, ...]
    reason: str | None = None
    timed_out: bool = False
    refused: bool = False

    @property
    def accepted_by(self) -> int:
        """Replicas that hold the adapter."""
        return sum(replica.accepted for replica in self.replicas)


@dataclass
class LoadCounts:
    """All loads that have ended: how, and in how many seconds where every replica accepted.

    Per replica the load requests sent, those sent again, acceptances and the seconds until them.
    """

    replicas: int
    done: int = 0
    failed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.attempts = [0] * self.replicas
        self.retries = [0] * self.replicas
        self.accepted = [0] * self.replicas
        self.seconds_until_accepted = [0.0] * self.replicas

    def count(self, load: OperationReport) -> None:
        """One more load has ended."""
        if load.ok:
            self.done += 1
            self.seconds += load.seconds
        else:
            self.failed += 1
        for number, part in enumerate(load.replicas):
            self.attempts[number] += part.attempts
            self.retries[number] += max(0, part.attempts - 1)
            if part.seconds is not None:
                self.accepted[number] += 1
                self.seconds_until_accepted[number] += part.seconds


@dataclass(frozen=True)
class Finished:
    """The operation with this number has ended."""

    operation: int
    report: OperationReport


Command = Send | SetRoutable | Forget | Abort | Finished
