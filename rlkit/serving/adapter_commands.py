"""What the adapter registry says: commands for the shell around it, and the report of one load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["list", "unload", "reset", "load", "pause", "resume"]


@dataclass(frozen=True)
class Send:
    """Ask one replica for something, and report the answer with the ticket. Seconds; `name` and `path` as needed."""

    ticket: int
    replica: int
    action: Action
    timeout_s: float
    name: str = ""
    path: str = ""


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
class ReplicaReport:
    """One replica's part in a load: requests sent, whether it holds the adapter, and its last refusal."""

    attempts: int
    accepted: bool
    reason: str | None = None


@dataclass(frozen=True)
class OperationReport:
    """How a load or unload ended: `seconds` from the request to the end, `reason` when it failed.

    A failed load has been taken back from every replica that had accepted it.
    """

    action: Literal["load", "unload"]
    name: str
    ok: bool
    seconds: float
    replicas: tuple[ReplicaReport, ...]
    reason: str | None = None

    @property
    def accepted_by(self) -> int:
        """Replicas that hold the adapter."""
        return sum(replica.accepted for replica in self.replicas)


@dataclass(frozen=True)
class Finished:
    """The operation with this number has ended."""

    operation: int
    report: OperationReport


Command = Send | SetRoutable | Forget | Finished
