"""The proxy between the trainer and the replicas: one address that behaves like one vLLM server.

Completions go to the replica the router chooses (`rlkit.serving.forward`), everything else to all of them
(`rlkit.serving.broadcast`). This module puts the parts together, watches the replicas and writes the counters.
`python -m rlkit.serving.proxy --config FILE.json` runs it as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rlkit.engines.parent_watch import exit_with_parent
from rlkit.errors import BadInput
from rlkit.serving.adapter_answers import Answer
from rlkit.serving.adapter_driver import AdapterDriver
from rlkit.serving.adapter_push import AdapterPush
from rlkit.serving.broadcast import Broadcaster
from rlkit.serving.control import ControlAnswer, ControlRequest, Routes, error, json_answer, text_answer
from rlkit.serving.exchange import NOT_HERE
from rlkit.serving.forward import Forwarder
from rlkit.serving.listening import base_url, cannot_listen
from rlkit.serving.moved_replica import parse_move
from rlkit.serving.proxy_config import ProxyConfig, load_proxy_config
from rlkit.serving.proxy_stats import ProxyCounts, ReplicaStatus, merged_page, own_metrics, stats_json
from rlkit.serving.registry import AdapterRegistry
from rlkit.serving.replica_health import ReplicaHealth
from rlkit.serving.router import Router
from rlkit.serving.server import Server
from rlkit.serving.upstream import Upstreams
from rlkit.serving.vllm_metrics import ReplicaReading, read_page

logger = logging.getLogger(__name__)

# How often replicas out of service are asked whether they are back: a rollout waits that long at most.
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0

# How often the replicas' own counters are read and the stats file is written.
READ_EVERY_S = 2.0
READ_TIMEOUT_S = 5.0

# A replica that answers neither its counters nor a single completion for so long has stopped: a suspended process, a
# dead network. It would hold its requests, and a load of an adapter, for as long as that lasts.
SILENT_S = 30.0

# What a stopping proxy leaves its clients to read answers that are on their way.
SHUTDOWN_S = 2.0


class Proxy:
    """A running proxy; see `serve`."""

    def __init__(self, config: ProxyConfig, upstreams: Upstreams, push: AdapterPush | None = None) -> None:
        count = len(config.replicas)
        transport = config.transport
        self.router = Router(count, config.routing.spill_threshold, config.routing.policy)
        self.registry = AdapterRegistry(
            count,
            retry_s=transport.retry_s,
            deadline_s=transport.deadline_s,
            max_loras=config.max_loras,
            policy_prefix=config.policy_prefix,
            pushes=push is not None,
            jitter=random.random,
        )
        self.url = ""
        self.watching: asyncio.Task[None] | None = None
        self._config = config
        self._upstreams = upstreams
        self._health = ReplicaHealth(count)
        self._push = push
        self._driver = AdapterDriver(self.registry, self.router, upstreams, push)
        self._forwarder = Forwarder(
            self.router,
            upstreams,
            self._health,
            on_lost=self._lost,
            on_forgotten=self._forgot,
            admission=self._driver,
        )
        if config.routing.block_size is not None:
            self._forwarder.block_size = config.routing.block_size
        self._pages: list[str | None] = [None] * count
        self._readings = [ReplicaReading()] * count
        self._first_readings: list[ReplicaReading | None] = [None] * count

    async def listen(self) -> None:
        """Take requests from now on. Raises OSError when the port cannot be had."""
        config = self._config
        bearer = config.incoming_token()
        if bearer is not None and self._forwarder.authorization is None:
            self._forwarder.authorization = ""  # the client's token is for the proxy, not for the replicas
        self.server = Server(self._forwarder, self._routes(), bearer)
        port = await self.server.listen(config.host, config.port)
        self.url = base_url(config.host, port)
        if config.port_file is not None:
            _write_atomically(config.port_file, f"{port}\n")

    def _routes(self) -> Routes:
        config = self._config
        control = Broadcaster(
            self._upstreams, self._driver, keeps_cache=config.keeps_cache, adapter_root=config.adapter_root
        )
        own: Routes = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/proxy/stats"): self._stats,
            ("POST", "/proxy/replicas"): self._move,
        }
        return control.routes() | own

    async def run(self) -> None:
        """Watch the replicas and write the counters until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in range(len(self._config.replicas)):
                group.create_task(self._watch(replica))
            if self._config.stats_file is not None:
                group.create_task(self._keep_writing())

    async def close(self) -> None:
        """Stop what is on its way and write the counters a last time."""
        await self._driver.close()
        await self._read_all()
        self._write_stats()

    def stats(self) -> dict[str, Any]:
        """The counters as of the last reading of the replicas."""
        return stats_json(self.router, self._statuses(), self._driver.reports, self._counts())

    def _counts(self) -> ProxyCounts:
        forwarder = self._forwarder
        return ProxyCounts(forwarder.block_size, forwarder.unrouted, forwarder.moved)

    async def _watch(self, replica: int) -> None:
        outcomes, heard_at = self._outcomes_of(replica), _now()
        while True:
            is_out = self._driver.registry.is_out(replica)
            answer = await (self._probe(replica) if is_out else self._look_at(replica))
            if answer is None or not answer.timed_out or self._outcomes_of(replica) != outcomes:
                outcomes, heard_at = self._outcomes_of(replica), _now()
            # A server under load may be slow to answer; only one that is not there, or says nothing for long, is out of
            # service.
            if answer is not None and answer.timed_out:
                if _now() - heard_at >= SILENT_S:
                    if not is_out:
                        self._lost(replica)
                    # What it was asked for, another replica can answer. Also when it was out before: what takes a
                    # replica out leaves it the requests it has, as long as it says anything.
                    self._upstreams.pools[replica].break_off()
            elif answer is not None and not is_out and _is_nobodys(answer) and self._health.failed(replica):
                self._lost(replica)

    async def _probe(self, replica: int) -> Answer | None:
        """Ask a replica that is out of service whether it is back; None while it is left alone."""
        answer = None
        if self._health.may_return(replica, _now()):
            answer = await self._upstreams.ask(replica, "GET", "/health", PROBE_TIMEOUT_S)
            if answer.status == HTTPStatus.OK:
                await self._welcome(replica)
        await asyncio.sleep(PROBE_EVERY_S)
        return answer

    async def _look_at(self, replica: int) -> Answer:
        await asyncio.sleep(READ_EVERY_S)
        return await self._read(replica)

    def _outcomes_of(self, replica: int) -> int:
        """Completions it has answered, whatever it said."""
        outcomes = self._forwarder.outcomes[replica]
        return outcomes.completed + outcomes.refused

    async def _welcome(self, replica: int) -> None:
        self._health.recovered(replica, _now())
        await self._read(replica)
        self._driver.replica_back(replica)

    async def _read(self, replica: int) -> Answer:
        answer = await self._upstreams.ask(replica, "GET", "/metrics", READ_TIMEOUT_S)
        self._pages[replica] = answer.text if answer.status == HTTPStatus.OK else None
        reading = read_page(self._pages[replica] or "")
        if not reading.is_empty:
            known, self._readings[replica] = self._readings[replica], reading
            is_newer = reading.is_of_newer_server(known)
            if self._first_readings[replica] is None or is_newer:
                self._first_readings[replica] = reading
            if is_newer and self.registry.serves(replica):
                self._restarted(replica, "it counts from zero")
            self._take_block_size()
        return answer

    def _take_block_size(self) -> None:
        """The first replica's that has told; replicas of one model have the same."""
        sizes = [reading.block_size for reading in self._readings if reading.block_size is not None]
        if self._config.routing.block_size is None and sizes:
            self._forwarder.block_size = sizes[0]

    async def _read_all(self) -> None:
        # One that is out may not answer at all: whoever asks for the counters does not wait for it.
        serving = [replica for replica in range(len(self._readings)) if self.registry.serves(replica)]
        await asyncio.gather(*map(self._read, serving))
        for replica in set(range(len(self._readings))) - set(serving):
            self._pages[replica] = None

    def _lost(self, replica: int) -> None:
        self._health.went(replica, _now())
        self._driver.replica_left(replica)

    def _forgot(self, replica: int, model: str) -> bool:
        if model not in self.registry.live:
            return False
        # Of several requests that were under way the first tells; the others are sent elsewhere just the same.
        if self.registry.serves(replica):
            self._restarted(replica, f"it does not know {model} any more")
        return True

    def _restarted(self, replica: int, sign: str) -> None:
        """Give a replica that nobody saw restart its adapters back before it gets requests again."""
        logger.warning("replica %d was restarted: %s", replica, sign)
        self._driver.replica_left(replica)
        self._driver.replica_back(replica)

    async def _move(self, request: ControlRequest) -> ControlAnswer:
        """A replica that was started anew somewhere else: it serves once it answers and has the live adapters."""
        try:
            moved = parse_move(request.fields(), len(self._config.replicas), needs_receiver=self._push is not None)
        except BadInput as problem:
            return error(HTTPStatus.BAD_REQUEST, str(problem))
        replica = moved.replica
        if moved.url != self._upstreams.urls[replica]:
            logger.warning("replica %d is at %s now", replica, moved.url)
            if not self.registry.is_out(replica):
                self._lost(replica)
            self._upstreams.move(replica, moved.url)
            self._pages[replica], self._readings[replica] = None, ReplicaReading()
            self._first_readings[replica] = None
        if self._push is not None and moved.receiver is not None:
            self._push.move(replica, moved.receiver)
        return text_answer(f"replica {replica} is at {moved.url}")

    async def _metrics(self, request: ControlRequest) -> ControlAnswer:
        await self._read_all()
        own = own_metrics(self.router, self._statuses(), self._driver.loads, self._counts())
        return ControlAnswer(body=merged_page(own, self._pages))

    async def _stats(self, request: ControlRequest) -> ControlAnswer:
        await self._read_all()
        return json_answer(self.stats())

    def _statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                url=url,
                serves=self.registry.serves(number),
                trouble=self.registry.trouble(number),
                outcomes=self._forwarder.outcomes[number],
                resent=self._upstreams.resent[number],
                reading=self._readings[number],
                first_reading=self._first_readings[number],
            )
            for number, url in enumerate(self._upstreams.urls)
        ]

    async def _keep_writing(self) -> None:
        while True:
            self._write_stats()
            await asyncio.sleep(READ_EVERY_S)

    def _write_stats(self) -> None:
        if self._config.stats_file is None:
            return
        try:
            _write_atomically(self._config.stats_file, json.dumps(self.stats(), indent=2) + "\n")
        except OSError as problem:
            logger.warning("cannot write %s: %s", self._config.stats_file, problem.strerror)


@asynccontextmanager
async def serve(config: ProxyConfig) -> AsyncIterator[Proxy]:
    """Run a proxy; inside the context it listens on `proxy.url`. Raises BadInput when it cannot."""
    async with AsyncExitStack() as stack:
        upstreams = await stack.enter_async_context(Upstreams(config.replicas, config.token()))
        bearer = config.receiver_token()
        push = None
        if config.transport.kind == "push" and bearer is not None:
            push = await stack.enter_async_context(AdapterPush(config.receivers, bearer))
        proxy = Proxy(config, upstreams, push)
        proxy.watching = asyncio.create_task(proxy.run())
        try:
            try:
                await proxy.listen()
            except (OSError, UnicodeError) as problem:
                raise cannot_listen(config.host, config.port, problem) from None
            logger.info("listening on %s", proxy.url)
            try:
                yield proxy
            finally:
                await proxy.server.close(SHUTDOWN_S)
        finally:
            proxy.watching.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await proxy.watching
            finally:
                # Also when the watch broke: the last counters are what tells why.
                await proxy.close()


def _is_nobodys(answer: Answer) -> bool:
    """Whether no server answered, or what stands in front of it did in its place."""
    return answer.status is None or answer.status in NOT_HERE


def _now() -> float:
    return asyncio.get_running_loop().time()


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: a request in flight takes two sockets."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on Windows, or not allowed to
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run_until_stopped(config: ProxyConfig) -> None:
    """Serve until SIGTERM or SIGINT; says on stdout where it listens. Raises BadInput when it cannot."""
    _allow_many_connections()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve(config) as proxy:
        print(f"proxy: {proxy.url} -> {', '.join(config.replicas)}", flush=True)
        assert proxy.watching is not None
        waiting = asyncio.create_task(stopped.wait())
        # A proxy that no longer watches its replicas is of no use: its error ends the process.
        await asyncio.wait({waiting, proxy.watching}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


def run(config: ProxyConfig) -> None:
    """`run_until_stopped` on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_until_stopped(config))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def log_to_stderr() -> None:
    """Say on stderr what happens to the replicas."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the proxy until SIGTERM, SIGINT or the end of its parent; exit code 2 for a bad configuration."""
    parser = argparse.ArgumentParser(prog="python -m rlkit.serving.proxy", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see rlkit.serving.proxy_config")
    log_to_stderr()
    try:
        config = load_proxy_config(parser.parse_args(arguments).config)
        if config.exit_with_parent:
            exit_with_parent()
        run(config)
    except BadInput as problem:
        print(f"proxy: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
