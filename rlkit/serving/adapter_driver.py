"""The I/O around the adapter registry: carries out its commands and tells it what came back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

from rlkit.serving.adapter_answers import Answer
from rlkit.serving.adapter_commands import Action, Command, Finished, Forget, OperationReport, Send, SetRoutable
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


class AdapterDriver:
    """Loads and unloads adapters on all replicas, and keeps the router in step."""

    def __init__(self, registry: AdapterRegistry, router: Router, upstreams: Upstreams) -> None:
        self.registry = registry
        self.reports: deque[OperationReport] = deque(maxlen=KEPT_REPORTS)  # loads, oldest first
        self._router = router
        self._upstreams = upstreams
        self._waiting: dict[int, asyncio.Future[OperationReport]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def load(self, name: str, path: str) -> OperationReport:
        """Load an adapter on every replica in service, or on none."""
        report = await self._until_finished(*self.registry.load(name, path, self._loop.time()))
        self.reports.append(report)
        return report

    async def unload(self, name: str) -> OperationReport:
        """Unload an adapter everywhere."""
        return await self._until_finished(*self.registry.unload(name, self._loop.time()))

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
                case Finished(operation, report):
                    self._waiting.pop(operation).set_result(report)
        if self._timer is not None:
            self._timer.cancel()
        wake = self.registry.next_wake
        self._timer = None if wake is None else self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._carry_out(self.registry.tick(self._loop.time()))

    async def _send(self, command: Send) -> None:
        method, path, params = _ENDPOINTS[command.action]
        body: dict[str, Any] | None = None
        if command.action in ("load", "unload"):
            body = {"lora_name": command.name}
            if command.action == "load":
                body["lora_path"] = command.path
        answer = await self._upstreams.ask(command.replica, method, path, command.timeout_s, body, params)
        if answer.status != 200:
            _log(command, answer)
        self._carry_out(self.registry.answered(command.ticket, answer, self._loop.time()))


def _log(command: Send, answer: Answer) -> None:
    what = f"{command.action} {command.name}".strip()
    logger.info("replica %d: %s: %s %s", command.replica, what, answer.status or "", answer.text[:300])
