"""How long a weight sync takes.

An adapter through a bucket: pause, save, then the proxy's own registry asks every replica until it has the adapter. A
replica answers `no adapter found` until its mount shows the files, `lag_s` after they were written, and an attempt
takes `load_s` either way: pause + save + the slowest replica's k*(load + retry) + load, k the attempts in vain. Pushed
adapters have no lag; full weights take `merged_s` in all.

The registry waits for up to `retry_s` between attempts; here it always waits that long.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass

from rlkit.errors import RunFailed
from rlkit.serving.adapter_answers import Answer
from rlkit.serving.adapter_commands import Command, Finished, OperationReport, Send
from rlkit.serving.registry import AdapterRegistry
from rlkit.simulation.setup import SyncSetup


@dataclass(frozen=True)
class Sync:
    """Seconds of one sync and of its parts, and how often each replica was asked to load."""

    seconds: float
    pause_s: float
    transfer_s: float
    attempts: tuple[int, ...] = ()

    @property
    def accept_s(self) -> float:
        """From the saved adapter to resumed servers: what the loads take."""
        return self.seconds - self.pause_s - self.transfer_s


class Publisher:
    """Publishes policy versions to `servers` servers, one after the other."""

    def __init__(self, setup: SyncSetup, servers: int, max_staleness: int, dice: random.Random) -> None:
        self._setup = setup
        self._servers = servers
        self._kept = max_staleness + 1
        self._dice = dice
        self._now = 0.0
        self._order = 0
        self._answers: list[tuple[float, int, int, Answer]] = []
        self._reports: list[OperationReport] = []
        self._visible_at = [0.0] * servers
        self._registry = AdapterRegistry(
            servers,
            retry_s=setup.retry_s,
            deadline_s=setup.deadline_s,
            max_loras=setup.max_loras,
            pushes=setup.kind == "push",
        )
        for server in range(servers):
            self._take(self._registry.replica_back(server, 0.0))
        self._settle()

    def publish(self, version: int) -> Sync:
        """Bring a version everywhere. Raises RunFailed when the registry gives it up, as TRL's trainer would fail."""
        setup = self._setup
        if setup.kind == "merged":
            return Sync(setup.merged_s, min(setup.pause_s, setup.merged_s), max(0.0, setup.merged_s - setup.pause_s))
        began = self._now
        if setup.kind == "bucket":
            # Whole milliseconds: see rlkit.simulation.lengths.
            lags = [round(self._dice.gauss(setup.lag_s, setup.lag_deviation_s), 3) for _ in range(self._servers)]
            self._visible_at = [began + lag for lag in lags]
        self._take(self._registry.load(_name(version), f"/policies/{_name(version)}", self._now)[1])
        report = self._settle()
        if not report.ok:
            raise RunFailed(f"the sync of version {version} failed: {report.reason}")
        seconds = self._now - began
        if version >= self._kept:
            self._take(self._registry.unload(_name(version - self._kept), self._now)[1])
            self._settle()
        attempts = tuple(replica.attempts for replica in report.replicas)
        return Sync(setup.pause_s + setup.save_s + seconds, setup.pause_s, setup.save_s, attempts)

    def _settle(self) -> OperationReport:
        """Let time pass until the registry waits for nothing; the last report."""
        while self._answers or (self._registry.next_wake is not None and not self._reports):
            wake = self._registry.next_wake
            if self._answers and (wake is None or self._answers[0][0] <= wake):
                self._now, _, ticket, answer = heapq.heappop(self._answers)
                self._take(self._registry.answered(ticket, answer, self._now))
            else:
                assert wake is not None
                self._now = max(self._now, wake)
                self._take(self._registry.tick(self._now))
        reports, self._reports = self._reports, []
        return reports[-1] if reports else OperationReport("load", "", True, 0.0, ())

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                seconds, answer = self._answer(command)
                self._order += 1
                heapq.heappush(self._answers, (self._now + seconds, self._order, command.ticket, answer))
            elif isinstance(command, Finished):
                self._reports.append(command.report)

    def _answer(self, send: Send) -> tuple[float, Answer]:
        """Seconds until a replica has answered, and its words; only a load takes time."""
        match send.action:
            case "load" if self._setup.kind == "push":
                return 0.0, Answer(200, "")
            case "load" if self._now < self._visible_at[send.replica]:
                message = f"Loading lora {send.name} failed: No adapter found for <path>"
                return self._setup.load_s, Answer(404, json.dumps({"error": {"message": message}}))
            case "load":
                return self._setup.load_s, Answer(200, "")
            case "push":
                return self._setup.push_s, Answer(200, json.dumps({"path": send.path}))
            case "list":
                return 0.0, Answer(200, '{"data": []}')
            case "reset":
                return 0.0, Answer(200, '{"success": true}')
            case _:
                return 0.0, Answer(200, "")


def _name(version: int) -> str:
    return f"trl-policy-v{version}"
