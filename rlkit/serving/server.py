"""The proxy's server side: one port, completions forwarded as they come, everything else to control handlers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qsl

from rlkit.serving.bearer import Bearer
from rlkit.serving.control import ControlAnswer, ControlRequest, Handler, Routes, error
from rlkit.serving.exchange import Exchange
from rlkit.serving.forward import Forwarder
from rlkit.serving.http_answer import CONTINUE, encode
from rlkit.serving.http_head import KnownHeads, Refused, RequestHead
from rlkit.serving.http_request import Request, RequestReader
from rlkit.serving.silence import probe_when_silent

logger = logging.getLogger(__name__)

COMPLETIONS = frozenset({"/v1/completions", "/v1/chat/completions"})

# Anybody may ask whether the proxy is well: what waits for it to come up has no token.
OPEN_PATHS = frozenset({"/health"})

# Rollout workers open all their connections at once; with the usual 128 the rest would wait for a second SYN.
BACKLOG = 2048

# A client has this long from the first byte of a request, and a second more for every 64 KiB it has sent: far below
# what any network does, and a sender of single bytes is cut off.
REQUEST_S = 15.0
SLOWEST_BYTES_PER_S = 64 * 1024

# Connections without a request are closed after this; above the 90 s that client libraries keep theirs at most, since
# whoever closes first loses the race with a request on its way.
IDLE_S = 120.0

# How often the three limits above are looked at.
SWEEP_EVERY_S = 1.0

# A connection closed while its client still sends is reset, and the client may never read why: it is read for this
# long after a refusal.
LINGER_S = 2.0

# What may wait for a slow client beside what was held back for it: one read of a replica's socket.
WRITE_BUFFER_BYTES = 256 * 1024

# Requests sent before the answer to the one before; more than this waits in the kernel.
PIPELINED_BYTES = 64 * 1024


class ClientConnection(asyncio.Protocol):
    """One connection of a client, with one request at a time."""

    def __init__(self, server: Server) -> None:
        self.keep_alive = True
        self.is_paused = False  # more is waiting for the client to read than should
        self.deadline = server.time() + REQUEST_S
        self._server = server
        self._reader = RequestReader(server.heads)
        self._transport: asyncio.Transport
        self._since: float | None = None  # when the first byte of a request came that is not complete
        self._is_busy = False
        self._is_over = False  # what comes now is read and thrown away
        self._waiting = b""  # received before the present answer was complete
        self._exchange: Exchange | None = None
        self._wants_body = True  # in the answer: not to HEAD

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self._is_busy

    # What the transport reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        probe_when_silent(transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_busy:
            self._waiting += data
            if len(self._waiting) > PIPELINED_BYTES:
                self._transport.pause_reading()
        elif not self._is_over:
            self._read(data)

    def connection_lost(self, problem: Exception | None) -> None:
        self._server.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
        # A control request goes on: half a pause would leave half the replicas paused.

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._exchange is not None:
            self._exchange.resume()

    # What an exchange or a control handler says.

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send bytes of an answer."""
        self._transport.writelines(parts)

    def answer(self, answer: ControlAnswer) -> None:
        """Send an answer in one piece."""
        self.write([encode(answer, keep_alive=self.keep_alive, with_body=self._wants_body)])
        self.finished(keep_alive=self.keep_alive)

    def finished(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self._exchange = None
        if not keep_alive or self._server.is_closing:
            self._is_busy, self._is_over = False, True
            self.deadline = self._server.time() + IDLE_S  # for a client that does not read its answer
            self._transport.close()
        elif self._waiting:
            # Not at once: a client may have sent a thousand requests that are all answered at once.
            asyncio.get_running_loop().call_soon(self._read_waiting)
        else:
            self._is_busy = False
            self.deadline = self._server.time() + IDLE_S

    def abort(self) -> None:
        """Break the connection off in the middle of an answer, which whoever says so knows to be over."""
        self._exchange = None
        self._transport.abort()

    def expire(self) -> None:
        """The deadline has passed."""
        if self._is_over or self._since is None:
            self._transport.abort()
        else:
            self._refuse(Refused(HTTPStatus.REQUEST_TIMEOUT, "the rest of the request did not come in time"))

    def hang_up(self) -> None:
        """Break the connection off, whoever is answering it."""
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Close the connection now, or after the present answer."""
        if not self._is_busy:
            self._transport.close()

    def _read_waiting(self) -> None:
        if self._transport.is_closing():
            return
        waiting, self._waiting = self._waiting, b""
        self._is_busy = False
        self._transport.resume_reading()
        self._read(waiting)

    def _read(self, data: bytes) -> None:
        try:
            request, self._waiting = self._reader.feed(data)
        except Refused as refused:
            self._refuse(refused)
            return
        if request is not None:
            self._begin(request)
            return
        head = self._reader.head
        if head is not None and not self._server.is_authorized(head):
            self._refuse(Refused(HTTPStatus.UNAUTHORIZED, "Unauthorized"))
            return
        now = self._server.time()
        if self._since is None:
            self._since = now
        self.deadline = self._since + REQUEST_S + self._reader.received / SLOWEST_BYTES_PER_S
        if self._reader.awaits_continue:
            self._transport.write(CONTINUE)

    def _begin(self, request: Request) -> None:
        self._is_busy = True
        self._since = None
        self.deadline = math.inf  # an answer takes as long as it takes
        head = request.head
        self.keep_alive = head.keep_alive
        self._wants_body = head.method != "HEAD"
        server = self._server
        if head.path not in OPEN_PATHS and not server.is_authorized(head):
            self.answer(error(HTTPStatus.UNAUTHORIZED, "Unauthorized", {"WWW-Authenticate": "Bearer"}))
        elif head.path in COMPLETIONS and head.method == "POST":
            if head.is_http_10:
                # It could not read an answer in chunks, and only the replica knows whether that is what comes.
                self.answer(error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "completions need HTTP/1.1"))
            else:
                exchange = Exchange(server.forwarder, self, request)
                self._exchange = exchange if exchange.start() else None
        else:
            self._answer_control(request)

    def _answer_control(self, request: Request) -> None:
        head = request.head
        method = "GET" if head.method == "HEAD" else head.method
        handler = self._server.routes.get((method, head.path))
        if handler is None:
            self.answer(self._server.no_such_path(head.path))
            return
        query = dict(parse_qsl(head.query, keep_blank_values=True))
        control = ControlRequest(method, head.path, query, request.body)
        self._server.keep(asyncio.get_running_loop().create_task(self._handle(handler, control)))

    async def _handle(self, handler: Handler, request: ControlRequest) -> None:
        try:
            answer = await handler(request)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            answer = error(HTTPStatus.INTERNAL_SERVER_ERROR, "a mistake in the proxy, told in its log")
        if not self._transport.is_closing():
            self.answer(answer)

    def _refuse(self, refused: Refused) -> None:
        self._is_over = True
        self.deadline = self._server.time() + LINGER_S
        self._transport.write(encode(error(refused.status, refused.reason), keep_alive=False))
        self._transport.write_eof()


class Server:
    """Listens for clients; `bearer` is the token they need, None when they need none."""

    def __init__(self, forwarder: Forwarder, routes: Routes, bearer: Bearer | None = None) -> None:
        self.forwarder = forwarder
        self.routes = routes
        self.bearer = bearer
        self.heads = KnownHeads()
        self.connections: set[ClientConnection] = set()
        self.is_closing = False
        self.time: Callable[[], float] = asyncio.get_running_loop().time
        self._listening: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._all_lost = asyncio.Event()
        self._controlling: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Listen; returns the port (0: any free one). Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: ClientConnection(self), host, port, backlog=BACKLOG)
        self._sweep()
        return int(self._listening.sockets[0].getsockname()[1])

    async def close(self, patience_s: float) -> None:
        """Take no more connections, leave those that are being answered some seconds, then break them off."""
        self.is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        try:
            async with asyncio.timeout(patience_s):
                while self.connections:
                    self._all_lost.clear()
                    await self._all_lost.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.hang_up()
        for task in self._controlling:
            task.cancel()
        await asyncio.gather(*self._controlling, return_exceptions=True)

    def keep(self, task: asyncio.Task[None]) -> None:
        """A control request is being handled."""
        self._controlling.add(task)
        task.add_done_callback(self._controlling.discard)

    def lost(self, connection: ClientConnection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_lost.set()

    def is_authorized(self, head: RequestHead) -> bool:
        """Whether a request has the token, when one is needed."""
        if self.bearer is None:
            return True
        given = [value for name, value in head.headers if name.lower() == b"authorization"]
        return len(given) == 1 and self.bearer.accepts(given[0].decode("latin-1"))

    def no_such_path(self, path: str) -> ControlAnswer:
        """404, or 405 for a path that has other methods."""
        allowed = [method for method, other in self.routes if other == path]
        allowed += ["POST"] if path in COMPLETIONS else []
        if allowed:
            return error(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed[0]}", {"Allow": ", ".join(allowed)})
        return error(HTTPStatus.NOT_FOUND, f"the proxy has no {path}; nothing was sent to the replicas")

    def _sweep(self) -> None:
        # First, so that a connection which cannot be closed does not end the watch over all others.
        self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep)
        now = self.time()
        for connection in list(self.connections):
            if connection.deadline < now:
                connection.expire()
