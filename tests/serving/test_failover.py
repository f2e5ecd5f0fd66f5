from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from proxy_bench import PATIENCE_S, eventually
from wire import Wire, raw_server, wire

from rlkit.serving import exchange
from rlkit.serving.exchange import HELD_BYTES
from rlkit.serving.forward import Forwarder
from rlkit.serving.replica_health import MAX_FAILURES, Outcomes, ReplicaHealth
from rlkit.serving.router import Router
from rlkit.serving.server import Server
from rlkit.serving.upstream import Upstreams

BODY = json.dumps({"model": "m", "prompt": list(range(40)), "seed": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def ok(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@dataclass
class Replica:
    """A replica that answers what it is told; None closes the connection."""

    answer: Callable[[int, int], bytes | None]
    asked: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    async def serve(self, connection: int, request: int) -> bytes | None:
        self.asked += 1
        await self.hold.wait()
        return self.answer(connection, request)


@dataclass
class Setup:
    """A forwarder and its server before such replicas, without a registry."""

    forwarder: Forwarder
    replicas: list[Replica]
    client: Wire
    url: str
    lost: list[int]
    forgotten: list[tuple[int, str]]
    stack: AsyncExitStack

    async def another(self) -> Wire:
        """Another client."""
        return await self.stack.enter_async_context(wire(self.url))

    async def complete(self) -> tuple[int, bytes]:
        status, body, _ = await self.client.send(POST)
        return status, body


@asynccontextmanager
async def forwarding(*answers: Callable[[int, int], bytes | None], remembers: bool = False) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        replicas = [Replica(answer) for answer in answers]
        urls = [await stack.enter_async_context(raw_server(replica.serve)) for replica in replicas]
        upstreams = await stack.enter_async_context(Upstreams(urls))
        router = Router(len(urls), 8)
        for replica in range(len(urls)):
            router.set_routable(replica, True)
        lost: list[int] = []
        forgotten: list[tuple[int, str]] = []

        def lose(replica: int) -> None:
            lost.append(replica)
            router.set_routable(replica, False)

        def forget(replica: int, model: str) -> bool:
            forgotten.append((replica, model))
            return remembers

        forwarder = Forwarder(router, upstreams, ReplicaHealth(len(urls)), on_lost=lose, on_forgotten=forget)
        server = Server(forwarder, {})
        url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        stack.push_async_callback(server.close, 0.0)
        client = await stack.enter_async_context(wire(url))
        yield Setup(forwarder, replicas, client, url, lost, forgotten, stack)
        assert router.in_flight == [0] * len(urls)


def works(connection: int, request: int) -> bytes | None:
    return ok(b"fine")


def dies(connection: int, request: int) -> bytes | None:
    return None


def stale(connection: int, request: int) -> bytes | None:
    """Closes its first connection when the second request comes on it."""
    return None if (connection, request) == (1, 2) else ok(b"fine")


async def test_a_kept_connection_that_was_closed_meanwhile_costs_one_more_sending() -> None:
    async with forwarding(stale) as setup:
        assert [await setup.complete() for _ in range(3)] == [(200, b"fine")] * 3
        assert setup.forwarder.upstreams.resent == [1]
        assert setup.forwarder.outcomes == [Outcomes(completed=3)]
        assert setup.replicas[0].asked == 4


async def test_a_stale_connection_is_no_reason_to_change_the_replica() -> None:
    async with forwarding(stale, stale) as setup:
        assert [await setup.complete() for _ in range(3)] == [(200, b"fine")] * 3
        assert [replica.asked for replica in setup.replicas] == [4, 0]
        assert setup.forwarder.moved == 0


async def test_a_request_is_sent_twice_at_most_to_one_replica() -> None:
    async with forwarding(
        lambda connection, request: ok(b"fine") if (connection, request) == (1, 1) else None
    ) as setup:
        assert (await setup.complete())[0] == 200
        status, body = await setup.complete()
        assert (status, b"it closed the connection" in body) == (502, True)
        assert setup.replicas[0].asked == 3
        assert setup.forwarder.outcomes == [Outcomes(completed=1, failed=1)]


async def test_a_new_connection_that_breaks_is_the_replicas_fault() -> None:
    async with forwarding(dies) as setup:
        assert (await setup.complete())[0] == 502
        assert (setup.forwarder.upstreams.resent, setup.replicas[0].asked) == ([0], 1)


async def test_a_request_that_ran_for_a_while_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STALE_WITHIN_S", -1.0)
    async with forwarding(stale) as setup:
        assert [(await setup.complete())[0] for _ in range(2)] == [200, 502]
        assert setup.forwarder.upstreams.resent == [0]


BAD_ANSWERS = [
    None,
    b"garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
    ok(b"two") + ok(b"answers"),
    ok(b"", b"502 Bad Gateway"),
    ok(b"<html>the job is starting</html>", b"503 Service Unavailable"),
    ok(b"", b"504 Gateway Timeout"),
]


@pytest.mark.parametrize("answer", BAD_ANSWERS)
async def test_before_a_byte_went_to_the_client_another_replica_is_asked_once(answer: bytes | None) -> None:
    async with forwarding(lambda *_: answer, works) as setup:
        assert await setup.complete() == (200, b"fine")
        assert [replica.asked for replica in setup.replicas] == [1, 1]
        assert setup.forwarder.outcomes == [Outcomes(failed=1), Outcomes(completed=1)]
        assert setup.forwarder.moved == 1


async def test_a_replica_that_dies_in_the_middle_of_a_held_answer_is_replaced() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nhalf of it" % HELD_BYTES
    async with forwarding(lambda connection, request: half if request == 1 else None, works) as setup:
        setup.client.writer.write(POST)
        await eventually(lambda: setup.replicas[0].asked == 1)
        for connection in setup.forwarder.upstreams.pools[0]._all:
            connection._transport.write(POST)  # at which the replica closes
        assert (await setup.client.answer())[:2] == (200, b"fine")


@pytest.mark.parametrize(
    "begin", [b"Content-Length: %d\r\n\r\nhalf" % (HELD_BYTES + 1), b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
)
async def test_once_the_client_has_a_byte_the_answer_breaks_off(begin: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + begin
    async with forwarding(lambda connection, request: answer if request == 1 else None, works) as setup:
        setup.client.writer.write(POST)
        async with asyncio.timeout(PATIENCE_S):
            await setup.client.reader.readuntil(b"half")
            for connection in setup.forwarder.upstreams.pools[0]._all:
                connection._transport.write(POST)  # at which the replica closes
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await setup.client.reader.readexactly(100)
        assert setup.replicas[1].asked == 0
        assert setup.forwarder.outcomes == [Outcomes(failed=1), Outcomes()]


async def test_garbage_in_the_middle_of_a_stream_is_not_passed_on() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    async with forwarding(lambda *_: answer) as setup:
        setup.client.writer.write(POST)
        async with asyncio.timeout(PATIENCE_S):
            await setup.client.reader.readuntil(b"half\r\n")
            (connection,) = setup.forwarder.upstreams.pools[0]._all
            connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
            assert await setup.client.reader.read() == b""


async def test_two_replicas_that_fail_are_all_that_is_tried() -> None:
    async with forwarding(dies, dies, works) as setup:
        setup.forwarder.router.route("other", (), 5)  # so that the third is not among the least loaded
        setup.forwarder.router.in_flight[:] = [0, 0, 5]
        assert (await setup.complete())[0] == 502
        assert [replica.asked for replica in setup.replicas] == [1, 1, 0]
        setup.forwarder.router.in_flight[:] = [0, 0, 0]


async def test_an_error_from_in_front_of_the_only_replica_is_passed_on() -> None:
    async with forwarding(lambda *_: ok(b"starting", b"503 Service Unavailable")) as setup:
        assert await setup.complete() == (503, b"starting")
        assert setup.forwarder.outcomes == [Outcomes(failed=1)]


async def test_a_500_is_an_answer() -> None:
    """It may be the request that does it: a second replica must not be lost to it."""
    async with forwarding(lambda *_: ok(b"dead", b"500 Internal Server Error"), works) as setup:
        assert await setup.complete() == (500, b"dead")
        assert setup.replicas[1].asked == 0


async def test_with_no_replica_left_the_client_is_told_when_to_come_back() -> None:
    async with forwarding(works) as setup:
        setup.forwarder.router.set_routable(0, False)
        status, body, head = await setup.client.send(POST)
        assert (status, b"no replica is in service" in body) == (503, True)
        assert (b"Retry-After", b"1") in head.headers
        setup.forwarder.router.set_routable(0, True)
        assert await setup.complete() == (200, b"fine")
        assert setup.forwarder.unrouted == 1


@pytest.mark.parametrize("failing", [dies, lambda *_: ok(b"", b"500 Internal Server Error")])
async def test_a_replica_that_fails_fast_draws_no_traffic(failing: Callable[[int, int], bytes | None]) -> None:
    async with forwarding(failing, works) as setup:
        for _ in range(50):
            await setup.complete()
        assert setup.lost == [0]
        assert setup.replicas[0].asked <= 2 * MAX_FAILURES
        assert setup.replicas[1].asked >= 50 - MAX_FAILURES


async def test_the_last_replica_is_not_sent_away_for_its_answers() -> None:
    async with forwarding(lambda *_: ok(b"dead", b"500 Internal Server Error")) as setup:
        assert {(await setup.complete())[0] for _ in range(5 * MAX_FAILURES)} == {500}
        assert setup.lost == []


def knows_nothing(connection: int, request: int) -> bytes | None:
    return ok(b'{"error": {"message": "The model `m` does not exist."}}', b"404 Not Found")


async def test_a_replica_that_lost_an_adapter_is_told_and_another_one_is_asked() -> None:
    async with forwarding(knows_nothing, works, remembers=True) as setup:
        assert await setup.complete() == (200, b"fine")
        assert setup.forgotten == [(0, "m")]
        assert setup.forwarder.outcomes == [Outcomes(failed=1), Outcomes(completed=1)]


def knows_nothing_in_chunks(connection: int, request: int) -> bytes | None:
    """As through a gateway that passes an answer on in chunks; longer than what is read at once."""
    told = b"The model `m` does not exist." + b" " * (HELD_BYTES - 1024)
    return b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(told), told)


async def test_a_replica_behind_a_gateway_that_lost_an_adapter_is_told_and_another_one_is_asked() -> None:
    async with forwarding(knows_nothing_in_chunks, works, remembers=True) as setup:
        assert await setup.complete() == (200, b"fine")
        assert setup.forgotten == [(0, "m")]
        assert setup.forwarder.outcomes == [Outcomes(failed=1), Outcomes(completed=1)]


async def test_a_refusal_in_chunks_without_end_is_passed_on() -> None:
    def endless(connection: int, request: int) -> bytes | None:
        told = b"-" * (2 * HELD_BYTES)
        chunk = b"%x\r\n%b\r\n" % (len(told), told)
        return b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n" + 2 * chunk + b"0\r\n\r\n"

    async with forwarding(endless, works, remembers=True) as setup:
        status, raw = await setup.complete()
        assert (status, raw.count(b"-"), raw[-5:]) == (404, 4 * HELD_BYTES, b"0\r\n\r\n")
        assert setup.forgotten == []


async def test_an_adapter_that_no_replica_has_for_now_is_not_said_to_be_none() -> None:
    async with forwarding(knows_nothing, knows_nothing, remembers=True) as setup:
        status, answer = await setup.complete()
        assert (status, json.loads(answer)["error"]["message"].endswith("it has lost the adapter")) == (502, True)
        assert setup.forgotten == [(0, "m"), (1, "m")]
        assert setup.forwarder.outcomes == [Outcomes(failed=1), Outcomes(failed=1)]
        assert setup.forwarder.router.in_flight == [0, 0]


async def test_a_model_that_nobody_knows_is_the_clients_mistake() -> None:
    async with forwarding(knows_nothing, works) as setup:
        assert (await setup.complete())[0] == 404
        assert setup.forwarder.outcomes == [Outcomes(refused=1), Outcomes()]


async def test_a_client_that_goes_away_ends_its_request_wherever_it_is() -> None:
    async with forwarding(works) as setup:
        setup.replicas[0].hold.clear()
        async with wire(setup.url) as other:
            other.writer.write(POST)
            await eventually(lambda: setup.replicas[0].asked == 1)
        await eventually(lambda: setup.forwarder.outcomes == [Outcomes(cancelled=1)])
        assert setup.forwarder.upstreams.pools[0].take() is None

        opening = asyncio.Event()

        async def never(*_: Any) -> Any:
            opening.set()
            await asyncio.Event().wait()

        pool = setup.forwarder.upstreams.pools[0]
        pool.connect = never  # type: ignore[method-assign]
        async with wire(setup.url) as other:
            other.writer.write(POST)
            await opening.wait()
        await eventually(lambda: setup.forwarder.outcomes == [Outcomes(cancelled=2)])


async def test_what_a_silent_replica_was_asked_for_another_one_answers() -> None:
    async with forwarding(works, works) as setup:
        assert await setup.complete() == (200, b"fine")
        setup.replicas[0].hold.clear()
        for kept in (True, False):
            client = setup.client if kept else await setup.another()
            client.writer.write(POST)
            await eventually(lambda: setup.replicas[0].asked == (2 if kept else 3))  # noqa: B023
        setup.forwarder.on_lost(0)
        setup.forwarder.upstreams.pools[0].break_off()
        assert (await setup.client.answer())[:2] == (await client.answer())[:2] == (200, b"fine")
        assert setup.forwarder.outcomes == [Outcomes(completed=1, failed=2), Outcomes(completed=2)]
        setup.replicas[0].hold.set()


class Gate:
    """An admission that keeps the uses and lets nobody ask for "secret"."""

    def __init__(self) -> None:
        self.open: list[Callable[[], object]] = []
        self.count: Counter[str] = Counter()

    def admit(self, model: str, abort: Callable[[], object]) -> Any:
        self.open.append(abort)
        self.count["admitted"] += model != "secret"
        return None if model == "secret" else abort

    def ended(self, use: Any) -> None:
        self.open.remove(use)
        self.count["ended"] += 1


async def test_a_model_that_may_not_be_asked_for() -> None:
    async with forwarding(works) as setup:
        gate = setup.forwarder.admission = Gate()
        body = json.dumps({"model": "secret", "prompt": "x"}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        status, answer, _ = await setup.client.send(head + body)
        assert (status, json.loads(answer)["error"]["message"]) == (404, "The model `secret` does not exist.")
        assert await setup.complete() == (200, b"fine")
        assert gate.count == {"admitted": 1, "ended": 1}


async def test_an_admission_ends_once_however_the_request_ends() -> None:
    async with forwarding(dies, lambda *_: ok(b"", b"503 Service Unavailable")) as setup:
        gate = setup.forwarder.admission = Gate()
        statuses = [(await setup.complete())[0] for _ in range(4)]
        setup.forwarder.router.set_routable(0, False)
        setup.forwarder.router.set_routable(1, False)
        statuses.append((await setup.complete())[0])
        assert set(statuses) <= {502, 503}
        assert gate.count == {"admitted": 5, "ended": 5}


async def test_a_request_whose_weights_are_replaced_is_told_so() -> None:
    async with forwarding(works) as setup:
        gate = setup.forwarder.admission = Gate()
        setup.replicas[0].hold.clear()
        setup.client.writer.write(POST)
        await eventually(lambda: setup.replicas[0].asked == 1)
        gate.open[0]()
        status, body, head = await setup.client.answer()
        assert (status, b"m is being replaced" in body, (b"Retry-After", b"1") in head.headers) == (503, True, True)
        assert setup.forwarder.outcomes == [Outcomes(failed=1)]
        assert gate.count["ended"] == 1
        setup.replicas[0].hold.set()
        assert await setup.complete() == (200, b"fine")


async def test_an_answer_of_the_old_weights_does_not_go_on() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    async with forwarding(lambda *_: answer) as setup:
        gate = setup.forwarder.admission = Gate()
        setup.client.writer.write(POST)
        async with asyncio.timeout(PATIENCE_S):
            await setup.client.reader.readuntil(b"half\r\n")
            gate.open[0]()
            assert await setup.client.reader.read() == b""
        assert setup.forwarder.outcomes == [Outcomes(failed=1)]


async def test_a_thousand_requests_at_a_replica_that_dies_all_have_an_answer() -> None:
    async with forwarding(dies, works) as setup, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(wire(setup.url)) for _ in range(100)]
        for client in clients:
            client.writer.write(POST * 10)
        answers: Awaitable[list[list[tuple[int, bytes, Any]]]] = asyncio.gather(*(ten(client) for client in clients))
        assert {answer[0] for answers_of_one in await answers for answer in answers_of_one} == {200}
        failed, completed = setup.forwarder.outcomes
        assert completed == Outcomes(completed=1000)
        assert failed.failed == setup.forwarder.moved <= 100


async def ten(client: Wire) -> list[tuple[int, bytes, Any]]:
    return [await client.answer() for _ in range(10)]
