"""Connections to one replica for completion requests: opened as needed, kept while idle, given out last one first."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

from rlkit.serving.http_answer import AnswerHead, AnswerReader, BadAnswer
from rlkit.serving.http_request import HEAD_END, RequestHead

# A replica's socket is up before its first answer, so a connection is made at once or not at all; 10 s allow for a
# machine whose cores are all busy. There is no other limit: generation takes as long as it takes, the client decides.
CONNECT_TIMEOUT_S = 10.0

# uvicorn closes a connection after 5 s without a request (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); ours goes first.
KEEP_ALIVE_S = 4.0

# Nothing is sent while a replica generates, so a machine that vanished would not be noticed for hours without these:
# first probe after a minute, given up after another.
TCP_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class Awaiting(Protocol):
    """Who waits for an answer; called by the connection that carries its request."""

    def received(self, head: AnswerHead | None, data: bytes | memoryview, *, complete: bool) -> None:
        """The head, when it is complete with these bytes, and bytes of the body."""

    def broke(self, reason: str) -> None:
        """The connection ended, or could not be had, before the answer was complete."""


@dataclass(frozen=True)
class Address:
    """Where a replica is; `prefix` is the path its API is under."""

    host: str
    port: int
    is_tls: bool
    host_header: str
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        """The address in a base URL. Raises ValueError when there is none."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        if not parts.hostname or not parts.netloc.isascii() or any(character.isspace() for character in url):
            raise ValueError(f"no host in {url}")
        host_header = parts.netloc.rpartition("@")[2]
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, host_header, parts.path.rstrip("/"))


def outgoing_head(head: RequestHead, address: Address, length: int, authorization: str | None) -> bytes:
    """A request's head as it goes to a replica, with a body of `length` bytes.

    `authorization`, when given, replaces the client's; an empty one takes it away.
    """
    lines = [
        f"{head.method} {address.prefix}{head.target} HTTP/1.1".encode("latin-1"),
        b"Host: " + address.host_header.encode(),
        *(
            name + b": " + value
            for name, value in head.headers
            if authorization is None or name.lower() != b"authorization"
        ),
        b"Content-Length: %d" % length,
    ]
    if authorization:
        lines.append(b"Authorization: " + authorization.encode("latin-1"))
    return b"\r\n".join(lines) + HEAD_END


class Connection(asyncio.Protocol):
    """One connection to a replica, with one request at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._reader = AnswerReader()
        self._transport: asyncio.Transport
        self._awaiting: Awaiting | None = None
        self.requests = 0
        self.idle_since = 0.0

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return self._pool.time()

    @property
    def has_answer_begun(self) -> bool:
        """Whether anything of the answer to the present request has come."""
        return self._reader.has_begun

    def send(self, awaiting: Awaiting, head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to `awaiting`."""
        self._awaiting = awaiting
        self.requests += 1
        self._reader.expect()
        self._transport.writelines((head, body))

    def abort(self) -> None:
        """Give up the present request: the replica sees the connection end and stops generating."""
        self._awaiting = None
        self._transport.abort()

    def pause(self) -> None:
        """Take no more of the answer for now."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Take more of the answer."""
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TCP_KEEP_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def data_received(self, data: bytes) -> None:
        awaiting = self._awaiting
        if awaiting is None:
            self._transport.abort()  # nobody asked
            return
        reader = self._reader
        try:
            head, body = reader.feed(data)
        except BadAnswer as problem:
            self.abort()
            awaiting.broke(str(problem))
            return
        complete = reader.is_complete
        if complete:
            self._awaiting = None
            if reader.is_reusable and self._transport.get_write_buffer_size() == 0:
                self._pool.give_back(self)
            else:
                self._transport.abort()
        awaiting.received(head, body, complete=complete)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        awaiting, self._awaiting = self._awaiting, None
        if awaiting is None:
            return
        if error is None and self._reader.close():
            awaiting.received(None, b"", complete=True)
        else:
            awaiting.broke(describe(error) if error is not None else "it closed the connection")


class ConnectionPool:
    """The connections to one replica. No limit on them: what runs at once is decided by the clients."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.address = Address.of(url)
        self._tls = tls if self.address.is_tls else None
        self._idle: dict[Connection, None] = {}  # the last one given back is at the end
        self._all: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time

    def take(self) -> Connection | None:
        """An idle connection, if there is one."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        if self.time() - connection.idle_since < KEEP_ALIVE_S:
            return connection
        # The last one given back is too old, so all are.
        connection.abort()
        self.expire()
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises OSError (TimeoutError and ssl.SSLError are) when there is none."""
        address = self.address
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self),
                address.host,
                address.port,
                ssl=self._tls,
                server_hostname=address.host if self._tls is not None else None,
            )
        self._all.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Its request is answered: keep it for the next one."""
        connection.idle_since = self.time()
        self._idle[connection] = None

    def lost(self, connection: Connection) -> None:
        """It is closed."""
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def expire(self) -> None:
        """Close what has been idle for too long; to be called now and then."""
        limit = self.time() - KEEP_ALIVE_S
        for connection in list(self._idle):
            if connection.idle_since > limit:
                break  # those behind it were given back later
            del self._idle[connection]
            connection.abort()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()


def describe(error: BaseException) -> str:
    """An error in one line; some have no words of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
