from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from rlkit.serving import upstream
from rlkit.serving.upstream import Upstreams, end_to_end

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Serve = Callable[[int, int], Awaitable[bytes | None]]


@asynccontextmanager
async def raw_server(serve: Serve) -> AsyncIterator[str]:
    """`serve(connection, request)` gives the bytes to answer with, None to close the connection without an answer."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number, request = connections, 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-le")
                    ),
                    0,
                )
                await reader.readexactly(length)
                request += 1
                answer = await serve(number, request)
                if answer is None:
                    return
                writer.write(answer)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(to: Upstreams) -> bytes:
    async with to.request(0, "POST", "/v1/completions", {}, b"{}") as response:
        return await response.read()


async def test_a_kept_connection_that_was_closed_meanwhile_costs_one_more_sending() -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return None if (connection, request) == (1, 2) else OK

    async with raw_server(serve) as url, Upstreams([url]) as to:
        assert [await ask(to), await ask(to)] == [b"ok", b"ok"]
        assert to.resent == [1]


async def test_a_new_connection_that_breaks_is_a_failure() -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return None

    async with raw_server(serve) as url, Upstreams([url]) as to:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(to)
        assert to.resent == [0]


async def test_a_request_is_sent_twice_at_most() -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return OK if (connection, request) == (1, 1) else None

    async with raw_server(serve) as url, Upstreams([url]) as to:
        await ask(to)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(to)
        assert to.resent == [1]


async def test_a_request_that_ran_for_a_while_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "STALE_WITHIN_S", 0.0)

    async def serve(connection: int, request: int) -> bytes | None:
        return OK if (connection, request) == (1, 1) else None

    async with raw_server(serve) as url, Upstreams([url]) as to:
        await ask(to)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(to)
        assert to.resent == [0]


async def test_a_small_request_has_its_failure_in_the_answer() -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        await asyncio.sleep(0 if connection == 1 else 60)
        return OK if connection == 1 else None

    async with Upstreams(["http://127.0.0.1:9"]) as to:
        answer = await to.ask(0, "GET", "/health", 5)
        assert (answer.status, answer.timed_out) == (None, False)
        assert "127.0.0.1:9" in answer.text
    async with raw_server(serve) as url:
        async with Upstreams([url]) as to:
            assert (await to.ask(0, "GET", "/health", 5)).text == "ok"
        async with Upstreams([url]) as to:
            answer = await to.ask(0, "GET", "/health", 0.01)
            assert (answer.status, answer.timed_out) == (None, True)


def test_hop_by_hop_headers_stay_behind() -> None:
    headers = {"Connection": "close, X-One", "X-One": "1", "X-Two": "2", "Transfer-Encoding": "chunked", "Host": "h"}
    assert dict(end_to_end(headers)) == {"X-Two": "2"}
