from __future__ import annotations

import asyncio

import pytest
from wire import raw_server

from rlkit.serving import upstream_pool
from rlkit.serving.http_answer import AnswerHead
from rlkit.serving.http_head import parse_head
from rlkit.serving.upstream import Upstreams
from rlkit.serving.upstream_pool import Address, Connection, ConnectionPool, outgoing_head, with_length

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"


class Waiting:
    """Collects one answer."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 0
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def received(self, head: AnswerHead | None, data: bytes | memoryview, *, complete: bool) -> None:
        if head is not None:
            self.status = head.status
        self.body += data
        if complete:
            self.done.set_result(None)

    def broke(self, reason: str) -> None:
        self.done.set_result(reason)


async def ask(pool: ConnectionPool) -> tuple[Connection, Waiting]:
    connection = pool.take() or await pool.connect()
    waiting = Waiting()
    connection.send(waiting, HEAD, b"{}")
    async with asyncio.timeout(20):
        await waiting.done
    return connection, waiting


async def answers(connection: int, request: int) -> bytes | None:
    return OK


async def test_a_connection_is_used_again() -> None:
    async with raw_server(answers) as url:
        pool = ConnectionPool(url)
        first, waiting = await ask(pool)
        assert (waiting.status, waiting.body) == (200, b"ok")
        second, _ = await ask(pool)
        assert second is first
        assert first.requests == 2
        pool.close()


async def test_the_last_one_used_is_the_next_one_used() -> None:
    async with raw_server(answers) as url:
        pool = ConnectionPool(url)
        one, other = await pool.connect(), await pool.connect()
        pool.give_back(one)
        pool.give_back(other)
        assert pool.take() is other
        assert pool.take() is one
        assert pool.take() is None
        pool.close()


async def test_what_was_idle_for_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_server(answers) as url:
        pool = ConnectionPool(url)
        first, _ = await ask(pool)
        monkeypatch.setattr(upstream_pool, "KEEP_ALIVE_S", 0.0)
        assert pool.take() is None
        second, _ = await ask(pool)
        assert second is not first
        pool.expire()
        assert pool.take() is None
        pool.close()


async def test_a_connection_the_server_closed_is_not_used() -> None:
    closed = asyncio.Event()

    async def serve(connection: int, request: int) -> bytes | None:
        if request > 1:
            return None
        closed.set()
        return OK

    async with raw_server(serve) as url:
        pool = ConnectionPool(url)
        first, _ = await ask(pool)
        first._transport.write(HEAD + b"{}")  # the server closes at the second request, which nobody waits for
        async with asyncio.timeout(20):
            while first in pool._all:
                await asyncio.sleep(0.002)
        assert pool.take() is None
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf",
        b"garbage\r\n\r\n",
        OK + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
async def test_no_whole_answer_is_told_once_and_the_connection_is_gone(answer: bytes | None) -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return answer if request == 1 else None

    async with raw_server(serve) as url:
        pool = ConnectionPool(url)
        connection = await pool.connect()
        waiting = Waiting()
        connection.send(waiting, HEAD, b"{}")
        if answer is not None and answer.endswith(b"half"):
            connection._transport.write(HEAD + b"{}")  # the server closes at the second request
        async with asyncio.timeout(20):
            assert await waiting.done is not None
        assert pool.take() is None
        pool.close()


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return b"HTTP/1.1 200 OK\r\n\r\nsome" if request == 1 else None

    async with raw_server(serve) as url:
        pool = ConnectionPool(url)
        connection = await pool.connect()
        waiting = Waiting()
        connection.send(waiting, HEAD, b"{}")
        connection._transport.write(HEAD + b"{}")  # the server closes at the second request
        async with asyncio.timeout(20):
            assert await waiting.done is None
        assert waiting.body == b"some"
        assert pool.take() is None
        pool.close()


async def test_no_connection_is_an_error() -> None:
    pool = ConnectionPool("http://127.0.0.1:9")
    with pytest.raises(ConnectionRefusedError):
        await pool.connect()


async def test_an_address_is_read_from_a_url() -> None:
    assert Address.of("http://127.0.0.1:8000") == Address("127.0.0.1", 8000, False, "127.0.0.1:8000", "")
    assert Address.of("https://job--8000.hf.jobs/") == Address("job--8000.hf.jobs", 443, True, "job--8000.hf.jobs", "")
    assert Address.of("http://[::1]:80/vllm/") == Address("::1", 80, False, "[::1]:80", "/vllm")
    for url in ("http://", "http://:80", "http://a b", "http://a:99999", "http://a\r\nX: b"):
        with pytest.raises(ValueError):  # noqa: PT011 (urlsplit has several)
            Address.of(url)


def test_a_head_goes_out_with_host_length_and_token_of_its_own() -> None:
    head, _ = parse_head(
        b"POST /v1/completions?a=b HTTP/1.1\r\nHost: here\r\nAccept: */*\r\nauthorization: Bearer mine\r\n"
        b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    address = Address("there", 80, False, "there:80", "/vllm")
    begin = b"POST /vllm/v1/completions?a=b HTTP/1.1\r\nHost: there:80\r\nAccept: */*"
    end = b"\r\nContent-Length: 5\r\n\r\n"
    assert with_length(outgoing_head(head, address, None), 5) == begin + b"\r\nauthorization: Bearer mine" + end
    assert with_length(outgoing_head(head, address, "Bearer t"), 5) == begin + b"\r\nAuthorization: Bearer t" + end
    assert with_length(outgoing_head(head, address, ""), 5) == begin + end


def test_a_head_shows_no_token() -> None:
    head, _ = parse_head(b"POST / HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer mine\r\n\r\n")
    head.outgoing["http://there"] = outgoing_head(head, Address("there", 80, False, "there:80", ""), "Bearer theirs")
    assert "method='POST'" in repr(head)
    assert "mine" not in repr(head)
    assert "theirs" not in repr(head)


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


async def test_a_small_requests_answer_is_taken_as_it_is() -> None:
    heads = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=base64",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere",
    )

    async def answer(connection: int, request: int) -> bytes | None:
        return heads[request - 1] + b"\r\nContent-Length: 3\r\n\r\n\xc3\xa4\xff"

    async with raw_server(answer) as url, Upstreams([url]) as upstreams:
        answers = [await upstreams.ask(0, "GET", "/health", 20.0) for _ in heads]
        assert [(answer.status, answer.text) for answer in answers] == [(200, "\u00e4\ufffd"), (307, "\u00e4\ufffd")]


@pytest.mark.parametrize("charset", [b"hex", b"nonsense", b"utf-16"])
async def test_a_small_answer_is_read_as_utf_8_whatever_its_header_says(charset: bytes) -> None:
    async def serve(connection: int, request: int) -> bytes | None:
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=%b\r\nContent-Length: 3\r\n\r\n\xc3\xbc\xff"
            % charset
        )

    async with raw_server(serve) as url, Upstreams([url]) as to:
        answer = await to.ask(0, "GET", "/health", 5)
        assert (answer.status, answer.text) == (200, "\u00fc\ufffd")
