from __future__ import annotations

import asyncio
import json
import math

import pytest
from proxy_bench import PATIENCE_S, eventually, proxied
from wire import wire

from rlkit.serving import server
from rlkit.serving.control import ControlAnswer, ControlRequest
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.replica_health import Outcomes
from rlkit.serving.upstream_pool import ConnectionPool

Replicas = list[EmulatedReplica]

BODY = json.dumps({"model": "emulated", "prompt": list(range(40)), "max_tokens": 4, "seed": 1}).encode()


def post(body: bytes = BODY, more: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (path, more, len(body), body)


async def test_one_connection_carries_completions_and_control(replicas: Replicas) -> None:
    async with proxied(replicas) as bench, wire(bench.proxy.url) as client:
        for _ in range(3):
            status, body, _ = await client.send(post())
            assert (status, json.loads(body)["object"]) == (200, "text_completion")
            status, body, _ = await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (status, json.loads(body)["data"][0]["id"]) == (200, "emulated")


async def test_requests_sent_ahead_are_answered_in_order(replicas: Replicas) -> None:
    many = 1200  # more than the interpreter nests calls
    nowhere = post(b"{}", path=b"/nowhere")
    async with proxied(replicas) as bench, wire(bench.proxy.url) as client:
        client.writer.write(post() + b"GET /is_paused HTTP/1.1\r\nHost: a\r\n\r\n" + nowhere * (many + 1))
        assert (await client.answer())[0] == 200
        assert json.loads((await client.answer())[1])["is_paused"] is False
        status, body, head = await client.answer()
        assert status == 404
        one = head.raw + body
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.readexactly(many * len(one)) == one * many
        assert (await client.send(post()))[0] == 200


async def test_a_request_in_chunks_and_one_that_waits_for_continue(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (10, BODY[:10], len(BODY) - 10, BODY[10:])
        assert (await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks))[0] == 200
        assert replicas[0].requests[-1][2]["Content-Length"] == str(len(BODY))
        client.writer.write(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.send(BODY))[0] == 200
        assert "Expect" not in replicas[0].requests[-1][2]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\nY: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n", 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
async def test_a_bad_request_is_told_why_and_its_connection_closed(
    replicas: Replicas, data: bytes, status: int
) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        before = len(replicas[0].requests)
        # Behind a refusal nothing is a request any more, whatever it looks like.
        got, body, head = await client.send(data + post())
        assert got == status
        assert json.loads(body)["error"]["message"]
        assert (b"Connection", b"close") in head.headers
        assert await client.is_closed()
        assert [path for _, path, _ in replicas[0].requests[before:] if path.startswith("/v1/completions")] == []
        assert bench.proxy.router.counts.routed == 0


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are looked at all the time."""
    monkeypatch.setattr(server, "SWEEP_EVERY_S", 0.01)


@pytest.mark.parametrize("part", [b"POST /v1/comp", post()[:-3]])
@pytest.mark.usefixtures("watchful")
async def test_a_slow_sender_is_told_so(replicas: Replicas, part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        await eventually(lambda: len(bench.proxy.server.connections) == 1)
        monkeypatch.setattr(server, "REQUEST_S", 0.02)
        status, _, head = await client.send(part)
        assert status == 408
        assert (b"Connection", b"close") in head.headers
        assert await client.is_closed()


@pytest.mark.usefixtures("watchful")
async def test_a_sender_of_single_bytes_is_cut_off(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_S", PATIENCE_S)
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        await eventually(lambda: len(bench.proxy.server.connections) == 1)
        monkeypatch.setattr(server, "REQUEST_S", 0.1)
        reading = asyncio.create_task(client.answer())
        client.writer.write(post(b"")[:50])
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                client.writer.write(b"a")
                await asyncio.sleep(0.005)
        assert (await reading)[0] == 408


@pytest.mark.usefixtures("watchful")
async def test_whoever_says_nothing_is_hung_up_on(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.02)
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        assert await client.is_closed()
    monkeypatch.setattr(server, "REQUEST_S", PATIENCE_S)
    monkeypatch.setattr(server, "IDLE_S", 0.02)
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        assert (await client.send(post()))[0] == 200
        assert await client.is_closed()


async def test_an_answer_takes_as_long_as_it_takes(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        await bench.post("/pause?mode=keep")
        client.writer.write(post())
        await eventually(lambda: replicas[0].in_flight == 1)
        assert math.inf in {connection.deadline for connection in bench.proxy.server.connections}
        await bench.post("/resume")
        assert (await client.answer())[0] == 200
        assert math.inf not in {connection.deadline for connection in bench.proxy.server.connections}


async def test_what_has_come_of_a_body_gives_the_rest_more_time(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SLOWEST_BYTES_PER_S", 1)
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        client.writer.write(post()[:-3])

        def seconds() -> float:
            (connection,) = bench.proxy.server.connections
            return 0.0 if connection._since is None else connection.deadline - connection._since

        await eventually(lambda: len(bench.proxy.server.connections) == 1)
        await eventually(lambda: seconds() == pytest.approx(server.REQUEST_S + len(BODY) - 3))
        assert (await client.send(post()[-3:]))[0] == 200


async def test_a_client_that_closes_and_an_older_one(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        async with wire(bench.proxy.url) as client:
            status, _, head = await client.send(post(more=b"Connection: close\r\n"))
            assert (status, (b"Connection", b"close") in head.headers) == (200, True)
            assert await client.is_closed()
        async with wire(bench.proxy.url) as client:
            status, _, _ = await client.send(b"GET /health HTTP/1.0\r\n\r\n")
            assert status == 200
            assert await client.is_closed()
        async with wire(bench.proxy.url) as client:
            assert (await client.send(post().replace(b"HTTP/1.1", b"HTTP/1.0")))[0] == 505


async def test_head_has_no_body(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        client.writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        status, body, head = await client.answer(to_head=True)
        assert (status, body) == (200, b"")
        assert head.length
        assert (await client.send(post()))[0] == 200


async def test_paths_and_methods_that_do_not_exist(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        status, _, head = await client.send(b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (status, (b"Allow", b"POST") in head.headers) == (405, True)
        status, _, head = await client.send(post(path=b"/health"))
        assert (status, (b"Allow", b"GET") in head.headers) == (405, True)
        for path in (b"/v1/completions/", b"/v1/completions%2f", b"//v1/completions", b"/V1/completions"):
            assert (await client.send(post(path=path)))[0] == 404


async def test_a_token_is_asked_for_and_not_passed_on(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_TOKEN", "secret")
    async with proxied(replicas[:1], incoming_token_env="PROXY_TOKEN") as bench, wire(bench.proxy.url) as client:
        for wrong in (b"", b"Authorization: Bearer wrong\r\n", b"Authorization: Bearer secret\r\n" * 2):
            status, body, _ = await client.send(post(more=wrong))
            assert status == 401
            assert b"secret" not in body
        assert (await client.send(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"))[0] == 401
        assert (await client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))[0] == 200
        assert (await client.send(post(more=b"Authorization: Bearer secret\r\n")))[0] == 200
        assert "Authorization" not in replicas[0].requests[-1][2]


async def test_without_the_token_no_body_is_taken(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_TOKEN", "secret")
    async with proxied(replicas[:1], incoming_token_env="PROXY_TOKEN") as bench:
        for path in (b"/v1/completions", b"/health"):
            async with wire(bench.proxy.url) as client:
                head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n" % path
                assert (await client.send(head + b"a" * 1000))[0] == 401
                assert await client.is_closed()


async def test_a_mistake_in_a_handler_is_an_answer(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:

        async def broken(request: ControlRequest) -> ControlAnswer:
            raise RuntimeError("a mistake")

        bench.proxy.server.routes["GET", "/metrics"] = broken
        status, body, _ = await client.send(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (status, b"a mistake in the proxy" in body) == (500, True)
        assert (await client.send(post()))[0] == 200


async def test_a_control_request_goes_on_without_its_client(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        going, went = asyncio.Event(), asyncio.Event()

        async def slow(request: ControlRequest) -> ControlAnswer:
            going.set()
            await asyncio.sleep(0.05)
            went.set()
            return ControlAnswer()

        bench.proxy.server.routes["POST", "/pause"] = slow
        async with wire(bench.proxy.url) as client:
            client.writer.write(post(path=b"/pause"))
            await going.wait()
        async with asyncio.timeout(PATIENCE_S):
            await went.wait()
        assert (await bench.get("/v1/models"))[0] == 200


async def test_a_proxy_that_stops_waits_for_answers_under_way(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as busy, wire(bench.proxy.url) as idle:
        assert (await idle.send(post()))[0] == 200
        await bench.post("/pause?mode=keep")
        busy.writer.write(post())
        await eventually(lambda: replicas[0].in_flight == 1)
        stopping = asyncio.create_task(bench.proxy.server.close(PATIENCE_S))
        assert await idle.is_closed()
        replicas[0].state.resumed.set()
        status, _, _ = await busy.answer()
        assert status == 200
        assert await busy.is_closed()
        await stopping


async def test_a_proxy_that_stops_does_not_wait_forever(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        replicas[0].faults.completions.append("hang")
        client.writer.write(post())
        await eventually(lambda: replicas[0].in_flight == 1)
        await bench.proxy.server.close(0.01)
        assert await client.is_closed()
        await eventually(lambda: replicas[0].aborted == 1)
        assert bench.proxy._forwarder.outcomes[0] == Outcomes(cancelled=1)


async def test_a_client_that_does_not_read_stops_the_replica_from_writing(replicas: Replicas) -> None:
    """What waits in the proxy is bounded, and nothing is lost."""
    size = 40_000_000
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        try:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            while written < size:
                writer.write(b"x" * 100_000)
                written += 100_000
                await writer.drain()
        finally:
            writer.close()

    raw = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with raw, proxied(replicas[:1]) as bench, wire(bench.proxy.url) as client:
        bench.proxy._upstreams.pools[0] = ConnectionPool(f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}")
        client.writer.write(post())
        await client.reader.readuntil(b"\r\n\r\n")
        before = -1
        async with asyncio.timeout(PATIENCE_S):
            while written != before:  # until the kernel's buffers and ours are full
                before = written
                await asyncio.sleep(0.2)
        assert written < size / 2
        async with asyncio.timeout(PATIENCE_S):
            assert len(await client.reader.readexactly(size)) == size
        assert (await client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))[0] in (200, 503)
