"""The data path: one completion request to the replica the router chose, and its answer back.

Everything passes through unchanged: status, end-to-end headers, body, a stream as it comes. What happened is counted
once for every replica a request was sent to, when it is over there. Nothing here waits: an exchange is driven by what
its two connections report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol

from rlkit.serving.control import RETRY_AFTER, ControlAnswer, error, no_replica
from rlkit.serving.forward import Forwarder
from rlkit.serving.http_answer import AnswerHead
from rlkit.serving.http_request import Request
from rlkit.serving.replica_health import Outcome
from rlkit.serving.router import Routed
from rlkit.serving.upstream_pool import Connection, ConnectionPool, describe

logger = logging.getLogger(__name__)

# A connection that was closed before the request came says so within a round trip. One that breaks later had a request
# that ran, and its replica is the one to blame.
STALE_WITHIN_S = 2.0

# An answer of a known length up to this is passed on when it is complete, so that a replica which dies in the middle of
# it can be replaced. A socket is read in pieces of this size: as much may be in memory in any case.
HELD_BYTES = 256 * 1024

# What stands in front of a replica says these for it (Bad Gateway, Service Unavailable, Gateway Timeout); whatever they
# mean there, another replica can answer. Plain numbers: looking up a member of HTTPStatus takes longer than comparing.
NOT_HERE = frozenset({502, 503, 504})
NOT_FOUND = 404


class Client(Protocol):
    """The connection a request came on."""

    keep_alive: bool
    is_paused: bool

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send bytes of the answer."""

    def finished(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def answer(self, answer: ControlAnswer) -> None:
        """Send an answer of the proxy's own."""

    def abort(self) -> None:
        """Break the connection, so that nobody takes what was sent for the whole."""


class Exchange:
    """One request on its way: to one replica, to a second if the first fails before the client got a byte."""

    # Most requests change few of these.
    _connection: Connection | None = None
    _opening: asyncio.Task[None] | None = None
    _head: AnswerHead | None = None
    _held: list[bytes | memoryview] | None = None  # an answer that is passed on when it is complete
    _begun = False  # the client has got a part of the answer
    _is_kept = _resent = _moved = False
    _use: Any = None

    def __init__(self, forwarder: Forwarder, client: Client, request: Request) -> None:
        self._forwarder = forwarder
        self._client = client
        self._request = request
        self._key = forwarder.keys.read(request.body)
        self._routed: Routed
        self._sent_at = 0.0

    def start(self) -> bool:
        """Route and send; False when the client was answered at once."""
        forwarder, key = self._forwarder, self._key
        use = forwarder.admission.admit(key.model, self.abort)
        if use is None:
            self._client.answer(error(HTTPStatus.NOT_FOUND, f"The model `{key.model}` does not exist."))
            return False
        routed = forwarder.router.route_chain(key.model, key.chain, key.sequences)
        if routed is None:
            forwarder.admission.ended(use)
            forwarder.unrouted += 1
            self._client.answer(no_replica())
            return False
        self._use = use
        self._send_to(routed)
        return True

    # What the replica's connection reports.

    def received(self, head: AnswerHead | None, data: bytes | memoryview, *, complete: bool) -> None:
        """Bytes of the answer."""
        if complete:
            self._connection = None  # it is another request's from now on, or gone
        if head is not None:
            self._head = head
            if head.status in NOT_HERE and self._is_another_routable():
                self._forwarder.blame(self._routed.replica, head.status)
                self._give_up_connection()
                self._fail_over(f"HTTP {head.status}")
                return
            parts: list[bytes | memoryview] = [head.for_client(self._client.keep_alive), data]
            if not complete and self._is_held(head, parts):
                self._held = parts
                return
        elif self._held is not None:
            parts = self._held
            parts.append(data)
            assert self._head is not None
            if not complete and self._is_held(self._head, parts):
                return
            self._held = None
        else:
            parts = [data]
        if complete and self._is_forgotten(parts):
            return
        self._begun = True
        self._client.write(parts)
        if complete:
            self._complete()
        elif self._client.is_paused:
            self.pause()

    def broke(self, reason: str) -> None:
        """The answer will not be complete."""
        connection, self._connection = self._connection, None
        replica = self._routed.replica
        if self._is_stale(connection):
            self._resent = True
            self._forwarder.upstreams.resent[replica] += 1
            self._open(self._forwarder.upstreams.pools[replica])
            return
        logger.warning("replica %d: %s", replica, reason)
        self._forwarder.blame(replica)
        if self._begun:
            self._end("failed")
            self._client.abort()
        else:
            self._fail_over(reason)

    # What the client's connection reports, and the driver of the adapters.

    def pause(self) -> None:
        """The client does not read as fast as the replica writes."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client has read."""
        if self._connection is not None:
            self._connection.resume()

    def client_gone(self) -> None:
        """The client went away: the replica need not go on."""
        self._give_up_connection()
        self._end("cancelled")

    def abort(self) -> None:
        """End the exchange: the model's name means other weights from now on."""
        if self._use is None:
            return
        self._give_up_connection()
        self._end("failed")
        if self._begun:
            self._client.abort()
        else:
            reason = f"{self._key.model} is being replaced by other weights: ask again"
            self._client.answer(error(HTTPStatus.SERVICE_UNAVAILABLE, reason, RETRY_AFTER))

    def _send_to(self, routed: Routed) -> None:
        self._routed = routed
        pool = self._forwarder.upstreams.pools[routed.replica]
        connection = pool.take()
        if connection is None:
            self._open(pool)
        else:
            self._send(connection)

    def _open(self, pool: ConnectionPool) -> None:
        self._opening = asyncio.get_running_loop().create_task(self._send_on_new(pool))

    async def _send_on_new(self, pool: ConnectionPool) -> None:
        try:
            connection = await pool.connect()
        except OSError as problem:
            self._opening = None
            self.broke(describe(problem))
            return
        self._opening = None
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self._is_kept = connection.requests > 0
        self._sent_at = connection.time()
        request = self._request
        head = self._forwarder.head_for(request.head, self._routed.replica, len(request.body))
        connection.send(self, head, request.body)

    def _is_stale(self, connection: Connection | None) -> bool:
        """Whether a kept connection broke because the replica had closed it before the request came."""
        if connection is None or not self._is_kept or self._resent or connection.has_answer_begun:
            return False
        if not self._forwarder.router.is_routable(self._routed.replica):
            return False
        return connection.time() - self._sent_at <= STALE_WITHIN_S

    def _is_held(self, head: AnswerHead, parts: Sequence[bytes | memoryview]) -> bool:
        """Whether an answer that is not complete waits for its end: a short one, and a refusal that comes in chunks."""
        if head.length is not None:
            return head.length <= HELD_BYTES
        # What stands in front of a replica may pass its answers on in chunks; only whole they say what they mean.
        return head.status == NOT_FOUND and sum(map(len, parts)) <= HELD_BYTES

    def _is_forgotten(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Whether the replica does not know an adapter it should know: another one is asked, or the client later."""
        assert self._head is not None
        if self._head.status != NOT_FOUND or self._begun or b"does not exist" not in b"".join(parts):
            return False
        if not self._forwarder.on_forgotten(self._routed.replica, self._key.model):
            return False
        self._fail_over("it has lost the adapter")
        return True

    def _is_another_routable(self) -> bool:
        return not self._moved and any(replica != self._routed.replica for replica in self._forwarder.router.routable)

    def _fail_over(self, reason: str) -> None:
        """Send the request to another replica, once; else say why there is no answer."""
        forwarder, key, failed = self._forwarder, self._key, self._routed.replica
        self._end_attempt("failed")
        self._head = self._held = None
        routed = None
        if not self._moved:
            routed = forwarder.router.route_chain(key.model, key.chain, key.sequences, avoid=failed)
        if routed is not None:
            self._moved = True
            forwarder.moved += 1
            self._resent = False
            self._send_to(routed)
            return
        self._end(None)
        if forwarder.router.routable:
            message = f"replica {failed} ({forwarder.upstreams.urls[failed]}): {reason}"
            self._client.answer(error(HTTPStatus.BAD_GATEWAY, message))
        else:
            self._client.answer(no_replica())

    def _complete(self) -> None:
        assert self._head is not None
        status = self._head.status
        self._end("completed" if status < 400 else "refused" if status < 500 else "failed")
        self._forwarder.blame(self._routed.replica, status)
        self._client.finished(keep_alive=self._client.keep_alive and not self._head.until_close)

    def _give_up_connection(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def _end_attempt(self, outcome: Outcome) -> None:
        self._forwarder.router.release(self._routed)
        self._forwarder.outcomes[self._routed.replica].count(outcome)

    def _end(self, outcome: Outcome | None) -> None:
        """The exchange is over; the outcome is that of the present attempt, None when that was counted before."""
        use, self._use = self._use, None
        assert use is not None
        if outcome is not None:
            self._end_attempt(outcome)
        self._forwarder.admission.ended(use)
