"""Which adapter versions should be on which replica, and what to send where until that is true everywhere.

A pure state machine: events and the time come in, commands go out (`rlkit.serving.adapter_commands`). It keeps what is
wanted, knows what each replica holds (`rlkit.serving.adapter_replica`) and reconciles the second with the first, one
request per replica at a time. A load is all or nothing: it ends when every replica that serves holds the adapter, or
the adapter is taken back from all of them. Between operations no replica that serves holds anything else. A replica
that (re)joins is not routable before it holds every live adapter. Loads and unloads take their turn, one after the
other.

A name is open to requests only while its adapter is live, and the requests that use it are counted. A name gets other
weights only when no request uses it any more: they are given a while to end, then they are ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlkit.serving.adapter_answers import Answer, Meaning
from rlkit.serving.adapter_commands import Abort, Command, Finished, Forget, Send, SetRoutable
from rlkit.serving.adapter_operation import Operation, Part, superseded
from rlkit.serving.adapter_replica import ReplicaAdapters, Request, WantedAdapter

# Listing, unloading and resetting touch no weights and answer within milliseconds; after ten seconds a server hangs.
CONTROL_TIMEOUT_S = 10.0

# How long the requests of an adapter may go on once it is to be unloaded or replaced. TRL moves to the new policy only
# when the unload of the oldest has been answered, so that every second here is one of older rollouts; and what still
# runs under the oldest is beyond max_staleness already.
DRAIN_S = 2.0

# Attempts are made after half to all of retry_s, so that replicas whose mounts lag together do not ask together.
SHORTEST_RETRY = 0.5


@dataclass
class _Link:
    """The conversation with one replica: the request on its way, or when the next one may go out."""

    adapters: ReplicaAdapters
    ticket: int | None = None
    asked: Request | None = None
    running: Mapping[str, int | None] = field(default_factory=dict)  # names in use when it was sent, with their serials
    not_before: float | None = None

    def may_hold(self, name: str) -> bool:
        """Whether the replica has an adapter of this name, or may have by now."""
        is_loading = self.asked is not None and self.asked.action == "load" and self.asked.name == name
        return is_loading or name in self.adapters.held


class AdapterRegistry:
    """Adapters over `replicas` replicas, all of them out of service until `replica_back`.

    At most `retry_s` seconds pass between two attempts on one replica (`jitter` draws from [0, 1] how many of them); a
    load not accepted everywhere after `deadline_s` seconds is rolled back. `max_loras` is the servers' own bound, over
    which vLLM would evict a live adapter silently. `policy_prefix` names the adapters that are swept from a replica
    when it is first met. `pushes`: files are pushed to each replica before it loads them.
    """

    def __init__(
        self,
        replicas: int,
        *,
        retry_s: float,
        deadline_s: float,
        max_loras: int,
        policy_prefix: str = "trl-policy-v",
        pushes: bool = False,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._links = [_Link(ReplicaAdapters(policy_prefix, pushes)) for _ in range(replicas)]
        self._retry_s = retry_s
        self._deadline_s = deadline_s
        self._max_loras = max_loras
        self._policy_prefix = policy_prefix
        self._jitter = jitter
        self._wanted: dict[str, WantedAdapter] = {}
        self._requests: dict[str, int] = {}  # how many requests use a name
        self._paused = False
        self._serials = 0
        self._tickets = 0
        self._operations = 0
        self._current: Operation | None = None
        self._queue: deque[Operation] = deque()
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
        operation = self._current
        if operation is not None and operation.draining and not operation.aborted:
            times.append(operation.drain_until)
        if operation is not None and operation.action == "load" and operation.failed is None:
            times.append(operation.deadline)
        return min(times, default=None)

    def is_open(self, name: str) -> bool:
        """Whether a request may ask for this model: a live adapter, or what the registry has no part in."""
        adapter = self._wanted.get(name)
        if adapter is not None:
            return adapter.live
        # An adapter on its way in or out is on some replicas only; so is a policy version that was never loaded here.
        return not name.startswith(self._policy_prefix) and not any(link.may_hold(name) for link in self._links)

    def admit(self, name: str) -> bool:
        """Count a request that asks for this model until `ended`; False when it may not be asked for."""
        if not self.is_open(name):
            return False
        self._requests[name] = self._requests.get(name, 0) + 1
        return True

    def ended(self, name: str, now: float) -> list[Command]:
        """A request that was admitted is over, whatever became of it."""
        self._requests[name] -= 1
        if self._requests[name]:
            return []
        del self._requests[name]
        is_waited_for = self._current is not None and self._current.draining and self._current.name == name
        return self._settle(now) if is_waited_for else []

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
        self._queue.append(Operation(self._operations, action, name, path, now, [Part() for _ in self._links]))
        return self._operations, self._settle(now)

    def _settle(self, now: float) -> list[Command]:
        while True:
            if self._current is not None and self._current.draining:
                self._drain(self._current, now)
            if self._current is not None and not self._current.draining and self._is_over(self._current, now):
                self._finish(self._current, now)
            if self._current is not None or not self._queue:
                break
            self._begin(self._queue.popleft(), now)
        for number, link in enumerate(self._links):
            self._reconcile(number, link, now)
        out, self._out = self._out, []
        return out

    def _begin(self, operation: Operation, now: float) -> None:
        self._current = operation
        operation.deadline = now + self._deadline_s
        operation.drain_until = now + DRAIN_S
        operation.draining = True
        if operation.action == "load":
            operation.drops = superseded(operation.name, self._wanted)
        elif operation.name in self._wanted:
            operation.drops = [operation.name]
        else:
            operation.failed = f"The lora adapter '{operation.name}' cannot be found."
            operation.draining = False
        for name in operation.drops:
            self._wanted[name].live = False

    def _drain(self, operation: Operation, now: float) -> None:
        is_busy = operation.name in self._requests
        # A paused request does not come to its end by waiting.
        is_time_up = now >= operation.drain_until or self._paused
        if is_busy and operation.action == "load":
            if is_time_up and not operation.aborted:
                operation.aborted = True
                self._out.append(Abort(operation.name))
            if now >= operation.deadline:
                self._fail(operation, "requests for the adapter it replaces did not end", timed_out=True)
            else:
                return
        elif is_busy and not is_time_up:
            return
        operation.draining = False
        for name in operation.drops:
            self._drop(name)
        if operation.is_loading:
            self._want(operation)

    def _want(self, operation: Operation) -> None:
        if len(self._wanted) >= self._max_loras:
            operation.refused = True
            operation.failed = (
                f"{len(self._wanted)} adapters are loaded and max_loras is {self._max_loras}: unload one first, or "
                "start the replicas with a higher --max-loras"
            )
            return
        self._serials += 1
        self._wanted[operation.name] = WantedAdapter(operation.name, operation.path, self._serials)

    def _drop(self, name: str) -> None:
        if self._wanted.pop(name, None) is not None:
            self._out.append(Forget(name))

    def _fail(self, operation: Operation, reason: str, *, timed_out: bool = False) -> None:
        operation.failed = reason
        operation.timed_out = timed_out
        self._drop(operation.name)

    def _is_over(self, operation: Operation, now: float) -> bool:
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
            self._fail(operation, f"{who} within {self._deadline_s:g} s", timed_out=True)
        # Whatever was dropped on the way (the adapter itself, versions of a run before) is off before the operation is
        # over: who is told of its end may rely on the replicas, and the next operation on their free slots.
        return all(self._is_clean(self._links[number]) for number in serving)

    def _is_clean(self, link: _Link) -> bool:
        asked = link.asked
        may_get_more = asked is not None and asked.action == "load" and not asked.is_wanted(self._wanted)
        return not may_get_more and not link.adapters.unwanted(self._wanted)

    def _finish(self, operation: Operation, now: float) -> None:
        adapter = self._wanted.get(operation.name)
        holders = [adapter is not None and link.adapters.holds(adapter) for link in self._links]
        self._out.append(Finished(operation.number, operation.report(holders, now)))
        self._current = None

    def _reconcile(self, number: int, link: _Link, now: float) -> None:
        adapters = link.adapters
        if adapters.phase == "out" or link.asked is not None or (link.not_before is not None and now < link.not_before):
            return
        link.not_before = None
        loading = self._current.name if self._current is not None and self._current.is_loading else None
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
        if request.brings_an_adapter:
            timeout_s = self._deadline_s
            if self._current is not None and self._current.is_loading and self._current.name == request.name:
                timeout_s = self._current.deadline - now
                self._current.parts[number].attempts += request.action == "load"
        self._tickets += 1
        link.ticket, link.asked, link.running = self._tickets, request, self._running()
        again = request.brings_an_adapter and self._wanted[request.name].live
        self._out.append(
            Send(self._tickets, number, request.action, timeout_s, request.name, request.path, request.serial, again)
        )

    def _running(self) -> dict[str, int | None]:
        """The names that requests use, with the serials of their weights; None: of a load that is gone."""
        return {name: self._wanted[name].serial if name in self._wanted else None for name in self._requests}

    def _take(self, number: int, link: _Link, asked: Request, answer: Answer, now: float) -> None:
        meaning = link.adapters.take(asked, answer, self._wanted, link.running)
        operation = self._current if self._concerns_the_load(number, asked) else None
        if meaning is Meaning.DONE:
            if operation is not None and asked.action == "load":
                operation.parts[number].accepted_at = now
            return
        reason = link.adapters.reason or ""
        if operation is not None:
            part = operation.parts[number]
            # The last attempt may be cut short by the deadline; what was said before is the reason.
            part.reason = part.reason if answer.timed_out and part.reason else reason
            if meaning in (Meaning.FINAL, Meaning.UNAVAILABLE):
                self._fail(operation, f"replica {number}: {reason}")
                return
        if asked.brings_an_adapter and not asked.is_wanted(self._wanted):
            return  # it will not be asked for again
        link.not_before = now + self._retry_s * (SHORTEST_RETRY + (1 - SHORTEST_RETRY) * self._jitter())
        # A lagging mount may refuse a load many times; the load's own deadline bounds that.
        if operation is None or not asked.brings_an_adapter:
            link.adapters.failures += 1
            if link.adapters.is_broken:
                self._leave(number)

    def _concerns_the_load(self, number: int, asked: Request) -> bool:
        if self._current is None or not self._current.is_loading or not self.serves(number):
            return False
        return not asked.brings_an_adapter or asked.is_wanted(self._wanted)

    def _leave(self, number: int) -> None:
        link = self._links[number]
        if self.serves(number):
            self._out.append(SetRoutable(number, False))
        link.adapters.leave(link.asked)
        link.ticket = link.asked = link.not_before = None
