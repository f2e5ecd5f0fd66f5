"""One load or unload on its way, and the report of how it ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rlkit.serving.adapter_commands import OperationReport, ReplicaReport

_VERSIONED = re.compile(r"(?P<policy>.+)-v(?P<version>\d+)")


@dataclass
class Part:
    """One replica's part in an operation."""

    attempts: int = 0
    reason: str | None = None
    accepted_at: float | None = None


@dataclass
class Operation:
    """A load or an unload. Times are those of the registry's events.

    It first drains: the requests that ask for its name come to their end. Then `drops` are taken off the replicas, and
    a load's adapter is put there.
    """

    number: int
    action: Literal["load", "unload"]
    name: str
    path: str
    asked_at: float
    parts: list[Part]
    drops: list[str] = field(default_factory=list)
    draining: bool = False
    drain_until: float = 0.0
    aborted: bool = False  # the requests were told to end
    deadline: float = 0.0
    failed: str | None = None
    timed_out: bool = False
    refused: bool = False

    @property
    def is_loading(self) -> bool:
        """Whether replicas should be given its adapter."""
        return self.action == "load" and not self.draining and self.failed is None

    def report(self, holders: Iterable[bool], now: float) -> OperationReport:
        """How it ended; `holders` says of each replica whether it holds the adapter."""
        replicas = tuple(
            ReplicaReport(
                part.attempts,
                holds,
                part.reason,
                part.accepted_at - self.asked_at if part.accepted_at is not None else None,
            )
            for part, holds in zip(self.parts, holders, strict=True)
        )
        return OperationReport(
            action=self.action,
            name=self.name,
            ok=self.failed is None,
            seconds=now - self.asked_at,
            replicas=replicas,
            reason=self.failed,
            timed_out=self.timed_out,
            refused=self.refused,
        )


def superseded(name: str, wanted: Collection[str]) -> list[str]:
    """Which of the wanted adapters have to go when `name` is loaded: itself, and leftovers of an earlier run.

    Versions only grow within one run. A version at or below one that is wanted therefore comes from a run that started
    over, and everything under that policy's name is the earlier run's.
    """
    new = _VERSIONED.fullmatch(name)
    if new is None:
        return [name] if name in wanted else []
    versions = {
        other: int(match["version"])
        for other in wanted
        if (match := _VERSIONED.fullmatch(other)) and match["policy"] == new["policy"]
    }
    return list(versions) if any(version >= int(new["version"]) for version in versions.values()) else []
