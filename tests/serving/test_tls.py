from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import aiohttp.web
import pytest
import trustme
import uvloop
from proxy_bench import PATIENCE_S
from wire import wire

from rlkit.serving.forward import Forwarder
from rlkit.serving.replica_health import ReplicaHealth
from rlkit.serving.router import Router
from rlkit.serving.server import Server
from rlkit.serving.upstream import Upstreams

BODY = json.dumps({"model": "m", "prompt": [1] * 40}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def answer_encrypted(
    authority: trustme.CA, name: str, answers: list[bytes], received: list[bytes]
) -> asyncio.Server:
    """A TLS server for `name` that gives one answer after the other on each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for answer in answers:
                received.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.readexactly(len(BODY))
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


async def ask_encrypted(
    authority: trustme.CA, name: str, answers: list[bytes]
) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    """What a client gets from a proxy before such a server, and the heads the server got."""
    received: list[bytes] = []
    async with await answer_encrypted(authority, name, answers, received) as replica:
        port = replica.sockets[0].getsockname()[1]
        async with Upstreams([f"https://localhost:{port}"], token="secret") as upstreams:
            router = Router(1, 8)
            router.set_routable(0, True)
            forwarder = Forwarder(
                router,
                upstreams,
                ReplicaHealth(1),
                on_lost=lambda replica: None,
                on_forgotten=lambda replica, model: False,
            )
            server = Server(forwarder, {})
            url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
            async with wire(url) as client, asyncio.timeout(PATIENCE_S):
                got = [(await client.send(POST))[:2] for _ in answers]
            await server.close(0.0)
    return got, received


def run(*arguments: object, on: str) -> tuple[list[tuple[int, bytes]], list[bytes]]:
    factory = uvloop.new_event_loop if on == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(ask_encrypted(*arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_replica_behind_tls(
    authority: trustme.CA, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    big = b"x" * 300_000
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(big), big),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nevent\r\n0\r\n\r\n",
    ]
    got, received = run(authority, "localhost", answers, on=loop)
    assert got == [(200, b"ok"), (200, big), (200, b"5\r\nevent\r\n0\r\n\r\n")]
    assert len(received) == 3
    assert all(b"Authorization: Bearer secret\r\n" in head for head in received)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(("name", "is_known"), [("localhost", False), ("elsewhere", True)])
def test_a_replica_that_cannot_prove_who_it_is_gets_no_request(
    authority: trustme.CA, loop: str, name: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_known:
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    got, received = run(authority, name, [b"never sent"], on=loop)
    ((status, body),) = got
    assert (status, b"certificate verify failed" in body, b"secret" in body) == (502, True, False)
    assert received == []


async def test_control_requests_trust_the_same_authorities(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def health(request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(text="well")

    app = aiohttp.web.Application()
    app.router.add_get("/health", health)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        async with Upstreams([f"https://localhost:{runner.addresses[0][1]}"]) as upstreams:
            answer = await upstreams.ask(0, "GET", "/health", PATIENCE_S)
    finally:
        await runner.cleanup()
    assert (answer.status, answer.text) == (200, "well")
