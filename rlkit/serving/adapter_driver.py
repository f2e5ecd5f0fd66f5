"""The I/O around the adapter registry: carries out its commands and tells it what came back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rlkit.serving.adapter_answers import Answer, message_of
from rlkit.serving.adapter_commands import (
    Abort,
    Action,
    Command,
    Finished,
    Forget,
    LoadCounts,
    OperationReport,
    Send,
    SetRoutable,
)
from rlkit.serving.adapter_manifests import AdapterManifests
from rlkit.serving.adapter_push import AdapterPush
from rlkit.serving.registry import AdapterRegistry
from rlkit.serving.router import Router
from rlkit.serving.upstream import Upstreams

logger = logging.getLogger(__name__)

# A published run has 126 syncs; this keeps a hundred such runs and bounds the memory of a server left alone.
KEPT_REPORTS = 10_000

_ENDPOINTS: dict[Action, tuple[str, str, dict[str, str]]] = {
    "list": ("GET", "/v1/models", {}),
    "load": ("POST", "/v1/load_lora_adapter", {}),
    "unload": ("POST", "/v1/unload_lora_adapter", {}),
    # Without the flag a reset fails while any request runs, a paused one included.
    "reset": ("POST", "/reset_prefix_cache", {"reset_running_requests": "true"}),
    "pause": ("POST", "/pause", {"mode": "keep", "clear_cache": "false"}),
    "resume": ("POST", "/resume", {}),
}


@dataclass(eq=False)
class AdapterUse:
    """A request that asks for a model, from `AdapterDriver.admit` to `AdapterDriver.ended`."""

    model: str
    abort: Callable[[], object]
    open: bool = True


class AdapterDriver:
    """Loads and unloads adapters on all replicas, and keeps the router in step."""

    def __init__(
        self, registry: AdapterRegistry, router: Router, upstreams: Upstreams, push: AdapterPush | None = None
    ) -> None:
        self.registry = registry
        self.reports: deque[OperationReport] = deque(maxlen=KEPT_REPORTS)  # loads, oldest first
        self.loads = LoadCounts(len(upstreams.urls))
        self._router = router
        self._upstreams = upstreams
        self._push = push
        self._manifests = AdapterManifests()
        self._uses: dict[str, set[AdapterUse]] = {}
        self._waiting: dict[int, asyncio.Future[OperationReport]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def load(self, name: str, path: str) -> OperationReport:
        """Load an adapter on every replica in service, or on none."""
        report = await self._until_finished(*self.registry.load(name, path, self._loop.time()))
        self.reports.append(report)
        self.loads.count(report)
        return report

    async def unload(self, name: str) -> OperationReport:
        """Unload an adapter everywhere."""
        return await self._until_finished(*self.registry.unload(name, self._loop.time()))

    def admit(self, model: str, abort: Callable[[], object]) -> AdapterUse | None:
        """Let a request ask for a model, or None when no replica, or not every one, has it with its own weights.

        `abort` ends the request early; it is called at most once, never from within `admit`, and `ended` follows it.
        """
        if not self.registry.admit(model):
            return None
        use = AdapterUse(model, abort)
        self._uses.setdefault(model, set()).add(use)
        return use

    def ended(self, use: AdapterUse) -> None:
        """A request that was admitted is over. A second call for the same request changes nothing."""
        if not use.open:
            return
        use.open = False
        uses = self._uses[use.model]
        uses.discard(use)
        if not uses:
            del self._uses[use.model]
        commands = self.registry.ended(use.model, self._loop.time())
        if commands:
            self._carry_out(commands)

    def replica_back(self, replica: int) -> None:
        """A replica answers: bring it up to date."""
        self._carry_out(self.registry.replica_back(replica, self._loop.time()))

    def replica_left(self, replica: int) -> None:
        """A replica does not answer."""
        logger.warning("replica %d is out of service", replica)
        self._carry_out(self.registry.replica_left(replica, self._loop.time()))

    def set_paused(self, paused: bool, replicas: Iterable[int]) -> None:
        """These replicas are now paused, or not; the others follow."""
        self._carry_out(self.registry.set_paused(paused, replicas, self._loop.time()))

    async def close(self) -> None:
        """Stop whatever is on its way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _until_finished(self, number: int, commands: list[Command]) -> OperationReport:
        finished = self._waiting[number] = self._loop.create_future()
        self._carry_out(commands)
        # The operation goes on when the client that asked for it goes away: half a load would be on half the replicas.
        return await asyncio.shield(finished)

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    task = self._loop.create_task(self._send(command))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case SetRoutable(replica, routable):
                    self._router.set_routable(replica, routable)
                    if routable:
                        logger.info("replica %d is in service", replica)
                case Forget(name):
                    self._router.forget_adapter(name)
                    self._manifests.forget(name)
                    if self._push is not None:
                        self._push.forget(name)
                case Abort(name):
                    for use in list(self._uses.get(name, ())):
                        self._loop.call_soon(_abort, use)
                case Finished(operation, report):
                    self._waiting.pop(operation).set_result(report)
        if self._timer is not None:
            self._timer.cancel()
        wake = self.registry.next_wake
        self._timer = None if wake is None else self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._carry_out(self.registry.tick(self._loop.time()))

    async def _send(self, command: Send) -> None:
        try:
            answer = await self._answer(command)
        except Exception as problem:
            # A mistake here. Without an answer the registry would wait for this replica, and with it every load.
            logger.exception("replica %d: %s", command.replica, command.action)
            answer = Answer(None, f"a mistake in the proxy, told in its log: {type(problem).__name__}")
        if answer.status != HTTPStatus.OK:
            what = f"{command.action} {command.name}".strip()
            logger.info("replica %d: %s: %s %s", command.replica, what, answer.status or "", message_of(answer))
        self._carry_out(self.registry.answered(command.ticket, answer, self._loop.time()))

    async def _answer(self, command: Send) -> Answer:
        if self._push is not None and command.action == "push":
            return await self._push.push(command.replica, command.name, command.path, command.serial, command.timeout_s)
        if self._push is not None and command.action == "discard":
            return await self._push.discard(command.replica, command.path, command.timeout_s)
        if self._push is None and command.action == "load":
            if command.again and await self._manifests.has_changed(command.serial, command.path):
                return Answer(HTTPStatus.CONFLICT, f"{command.path}: not what it was when the adapter was loaded")
            self._manifests.begin(command.name, command.serial, command.path)
        method, path, params = _ENDPOINTS[command.action]
        body: dict[str, Any] | None = None
        if command.action in ("load", "unload"):
            body = {"lora_name": command.name}
            if command.action == "load":
                body["lora_path"] = command.path
        return await self._upstreams.ask(command.replica, method, path, command.timeout_s, body, params)


def _abort(use: AdapterUse) -> None:
    if use.open:
        use.abort()
