"""What the tests send and answer byte by byte: a client and a server that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proxy_bench import PATIENCE_S

from rlkit.serving.http_answer import AnswerHead, AnswerReader

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
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length: " in head:
                    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                request += 1
                answer = await serve(number, request)
                if answer is None:
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Wire:
    """A client that sends what it is told and reads answers one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, *, to_head: bool = False) -> tuple[int, bytes, AnswerHead]:
        """The next answer: status, body, head."""
        follower = AnswerReader()
        follower.expect()
        head, body = None, b""
        async with asyncio.timeout(PATIENCE_S):
            while not follower.is_complete and not (to_head and head is not None):
                # Byte by byte up to the end of the head, then what belongs to this answer and no more.
                size = 1 if head is None or head.length is None else head.length - len(body)
                data = await self.reader.readexactly(size)
                found, part = follower.feed(data)
                head, body = head or found, body + part
        assert head is not None
        return head.status, body, head

    async def send(self, data: bytes) -> tuple[int, bytes, AnswerHead]:
        self.writer.write(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read(1) == b""


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
