"""Which adapter versions should be on which replica, and what to send where until that is true everywhere.

A pure state machine: events and the time come in, commands go out (`rlkit.serving.adapter_commands`). It keeps what is
wanted, knows what each replica holds (`rlkit.serving.adapter_replica`) and reconciles the second with the first, one
request per replica at a time. A load is all or nothing: it ends when every replica that serves holds the adapter, or
the adapter is taken back from all of them. A replica that (re)joins is not routable before it holds every live adapter.
Loads and unloads take their turn, one after the other.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlkit.serving.adapter_answers import Answer, Meaning
from rlkit.serving.adapter_commands import Command, Finished, Forget, OperationReport, ReplicaReport, Send, SetRoutable
from rlkit.serving.adapter_replica import ReplicaAdapters, Request, WantedAdapter

# Listing, unloading and resetting touch no weights and answer within milliseconds; after ten seconds a server hangs.
CONTROL_TIMEOUT_S = 10.0

_VERSIONED = re.compile(r"(?P<policy>.+)-v(?P<version>\d+)")


@dataclass
class _Operation:
    number: int
    action: Literal["load", "unload"]
    name: str
    path: str
    asked_at: float
    attempts: list[int]
    reasons: list[str | None]
    deadline: float = 0.0
    failed: str | None = None


@dataclass
class _Link:
    """The conversation with one replica: the request on its way, or when the next one may go out."""

    adapters: ReplicaAdapters
    ticket: int | None = None
    asked: Request | None = None
    not_before: float | None = None


class AdapterRegistry:
    """Adapters over `replicas` replicas, all of them out of service until `replica_back`.

    `retry_s` seconds pass between two attempts on one replica; a load not accepted everywhere after `deadline_s`
    seconds is rolled back. `max_loras` is the servers' own bound, over which vLLM would evict a live adapter silently.
    `policy_prefix` names the adapters that are swept from a replica when it is first met.
    """

    def __init__(
        self, replicas: int, *, retry_s: float, deadline_s: float, max_loras: int, policy_prefix: str = "trl-policy-v"
    ) -> None:
        self._links = [_Link(ReplicaAdapters(policy_prefix)) for _ in range(replicas)]
        self._retry_s = retry_s
        self._deadline_s = deadline_s
        self._max_loras = max_loras
        self._wanted: dict[str, WantedAdapter] = {}
        self._paused = False
        self._serials = 0
        self._tickets = 0
        self._operations = 0
        self._current: _Operation | None = None
        self._queue: deque[_Operation] = deque()
        self._out: list[Command] = []

    @property
    def live(self) -> dict[str, str]:
        """Names and paths of the adapters that every replica in service holds."""
        return {adapter.name: adapter.path for adapter in self._wanted.values() if adapter.live}

    def serves(self, replica: int) -> bool:
        """Whether requests may go to this replica."""
        return self._links[replica].adapters.phase == "serving"

    def is_out(self, replica: int) -> bool:
        """Whether this replica was last known not to answer."""
        return self._links[replica].adapters.phase == "out"

    def trouble(self, replica: int) -> str | None:
        """The last thing a replica refused, as long as it does not serve."""
        return None if self.serves(replica) else self._links[replica].adapters.reason

    @property
    def next_wake(self) -> float | None:
        """When `tick` has something to do at the latest, on the clock of the events; None: nothing waits for time."""
        times = [link.not_before for link in self._links if link.not_before is not None]
        if self._current is not None and self._current.action == "load" and self._current.failed is None:
            times.append(self._current.deadline)
        return min(times, default=None)

    def load(self, name: str, path: str, now: float) -> tuple[int, list[Command]]:
        """Start to load an adapter everywhere; the number comes back in `Finished`."""
        return self._ask("load", name, path, now)

    def unload(self, name: str, now: float) -> tuple[int, list[Command]]:
        """Start to unload an adapter everywhere; the number comes back in `Finished`."""
        return self._ask("unload", name, "", now)

    def answered(self, ticket: int, answer: Answer, now: float) -> list[Command]:
        """A replica's answer to a `Send`. One to a request that was given up (the replica left) changes nothing."""
        for number, link in enumerate(self._links):
            if link.ticket == ticket and link.asked is not None:
                asked, link.ticket, link.asked = link.asked, None, None
                self._take(number, link, asked, answer, now)
        return self._settle(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        return self._settle(now)

    def replica_back(self, replica: int, now: float) -> list[Command]:
        """A replica answers again (or for the first time): bring its adapters up to date, then route to it."""
        if self._links[replica].adapters.phase == "out":
            self._links[replica].adapters.join()
        return self._settle(now)

    def replica_left(self, replica: int, now: float) -> list[Command]:
        """A replica does not answer any more."""
        self._leave(replica)
        return self._settle(now)

    def set_paused(self, paused: bool, replicas: Iterable[int], now: float) -> list[Command]:
        """Generation is now paused (or not) on these replicas, and should be on all: the others follow."""
        self._paused = paused
        for replica in replicas:
            self._links[replica].adapters.paused = paused
        return self._settle(now)

    def _ask(self, action: Literal["load", "unload"], name: str, path: str, now: float) -> tuple[int, list[Command]]:
        self._operations += 1
        replicas = len(self._links)
        self._queue.append(_Operation(self._operations, action, name, path, now, [0] * replicas, [None] * replicas))
        return self._operations, self._settle(now)

    def _settle(self, now: float) -> list[Command]:
        while True:
            if self._current is not None and self._is_over(self._current, now):
                self._finish(self._current, now)
            if self._current is not None or not self._queue:
                break
            self._begin(self._queue.popleft(), now)
        for number, link in enumerate(self._links):
            self._reconcile(number, link, now)
        out, self._out = self._out, []
        return out

    def _begin(self, operation: _Operation, now: float) -> None:
        self._current = operation
        operation.deadline = now + self._deadline_s
        if operation.action == "unload":
            if operation.name not in self._wanted:
                operation.failed = f"The lora adapter '{operation.name}' cannot be found."
            self._drop(operation.name)
            return
        for name in self._superseded_by(operation.name):
            self._drop(name)
        if len(self._wanted) >= self._max_loras:
            operation.failed = (
                f"{len(self._wanted)} adapters are loaded and max_loras is {self._max_loras}: unload one first, or "
                "start the replicas with a higher --max-loras"
            )
            return
        self._serials += 1
        self._wanted[operation.name] = WantedAdapter(operation.name, operation.path, self._serials)

    def _superseded_by(self, name: str) -> list[str]:
        # Versions only grow within one run. A version at or below a live one therefore comes from a run that started
        # over, and everything loaded under that policy's name is a leftover of the run before.
        new = _VERSIONED.fullmatch(name)
        if new is None:
            return [name]
        versions = {
            other: int(match["version"])
            for other in self._wanted
            if (match := _VERSIONED.fullmatch(other)) and match["policy"] == new["policy"]
        }
        return list(versions) if any(version >= int(new["version"]) for version in versions.values()) else []

    def _drop(self, name: str) -> None:
        if self._wanted.pop(name, None) is not None:
            self._out.append(Forget(name))

    def _fail(self, operation: _Operation, reason: str) -> None:
        operation.failed = reason
        self._drop(operation.name)

    def _is_over(self, operation: _Operation, now: float) -> bool:
        serving = [number for number in range(len(self._links)) if self.serves(number)]
        if operation.action == "load" and operation.failed is None:
            adapter = self._wanted[operation.name]
            lagging = [number for number in serving if not self._links[number].adapters.holds(adapter)]
            if serving and not lagging:
                adapter.live = True
                return True
            if now < operation.deadline:
                return False
            who = (
                f"replica {', '.join(map(str, lagging))} did not accept it" if serving else "no replica was in service"
            )
            self._fail(operation, f"{who} within {self._deadline_s:g} s")
        # Whatever was dropped on the way (the adapter itself, versions of a run before) is off before the operation is
        # over: who is told of its end may rely on the replicas, and the next operation on their free slots.
        return all(self._is_clean(self._links[number]) for number in serving)

    def _is_clean(self, link: _Link) -> bool:
        asked = link.asked
        may_get_more = asked is not None and asked.action == "load" and not asked.is_wanted(self._wanted)
        return not may_get_more and not link.adapters.unwanted(self._wanted)

    def _finish(self, operation: _Operation, now: float) -> None:
        adapter = self._wanted.get(operation.name)
        replicas = tuple(
            ReplicaReport(attempts, adapter is not None and link.adapters.holds(adapter), reason)
            for link, attempts, reason in zip(self._links, operation.attempts, operation.reasons, strict=True)
        )
        ok, seconds = operation.failed is None, now - operation.asked_at
        report = OperationReport(operation.action, operation.name, ok, seconds, replicas, operation.failed)
        self._out.append(Finished(operation.number, report))
        self._current = None

    def _reconcile(self, number: int, link: _Link, now: float) -> None:
        adapters = link.adapters
        if adapters.phase == "out" or link.asked is not None or (link.not_before is not None and now < link.not_before):
            return
        link.not_before = None
        loading = self._current.name if self._current is not None else None
        request = adapters.next_request(self._wanted, loading, self._paused)
        if request is not None:
            self._send(number, link, request, now)
        elif adapters.phase == "joining":
            adapters.phase = "serving"
            self._out.append(SetRoutable(number, True))
            # It takes part in the load under way from here on.
            self._reconcile(number, link, now)

    def _send(self, number: int, link: _Link, request: Request, now: float) -> None:
        timeout_s = CONTROL_TIMEOUT_S
        if request.action == "load":
            timeout_s = self._deadline_s
            if self._current is not None and self._current.name == request.name:
                timeout_s = self._current.deadline - now
                self._current.attempts[number] += 1
        self._tickets += 1
        link.ticket, link.asked = self._tickets, request
        self._out.append(Send(self._tickets, number, request.action, timeout_s, request.name, request.path))

    def _take(self, number: int, link: _Link, asked: Request, answer: Answer, now: float) -> None:
        meaning = link.adapters.take(asked, answer, self._wanted)
        if meaning is Meaning.DONE:
            return
        operation = self._current
        reason = link.adapters.reason or ""
        is_current = (
            operation is not None and operation.failed is None and operation.action == "load" and self.serves(number)
        )
        if operation is not None and is_current:
            operation.reasons[number] = reason
            if meaning in (Meaning.FINAL, Meaning.UNAVAILABLE):
                self._fail(operation, f"replica {number}: {reason}")
                return
        link.not_before = now + self._retry_s
        # A lagging mount may refuse a load many times; the load's own deadline bounds that.
        if asked.action != "load" or not is_current:
            link.adapters.failures += 1
            if link.adapters.is_broken:
                self._leave(number)

    def _leave(self, number: int) -> None:
        link = self._links[number]
        if self.serves(number):
            self._out.append(SetRoutable(number, False))
        link.adapters.phase = "out"
        link.ticket = link.asked = link.not_before = None
