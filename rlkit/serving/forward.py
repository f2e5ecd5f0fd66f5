"""The data path: one completion request to the replica the router chose, and its answer back.

Everything passes through unchanged: status, end-to-end headers, body, a stream as it comes. What happened is counted
once for every replica a request was sent to, when it is over there. Nothing here awaits: an exchange is driven by what
its two connections report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from rlkit.serving.control import ControlAnswer, error
from rlkit.serving.http_answer import AnswerHead
from rlkit.serving.http_request import Request, RequestHead
from rlkit.serving.replica_health import Outcome, Outcomes, ReplicaHealth
from rlkit.serving.request_key import RequestKeys
from rlkit.serving.router import Routed, Router
from rlkit.serving.upstream import Upstreams
from rlkit.serving.upstream_pool import Connection, ConnectionPool, describe, outgoing_head

logger = logging.getLogger(__name__)

# vLLM's default on a GPU; only until a replica has said what it uses.
DEFAULT_BLOCK_SIZE = 16

# A connection that was closed before the request came says so within a round trip. One that breaks later had a request
# that ran, and its replica is the one to blame.
STALE_WITHIN_S = 2.0

# An answer of a known length up to this is passed on when it is complete, so that a replica which dies in the middle of
# it can be replaced. A socket is read in pieces of this size: as much may be in memory in any case.
HELD_BYTES = 256 * 1024

# What stands in front of a replica says these for it; whatever they mean there, another replica can answer.
NOT_HERE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})

# Seconds a client should wait; replicas out of service are asked once a second whether they are back.
RETRY_AFTER = {"Retry-After": "1"}


class Client(Protocol):
    """The connection a request came on."""

    keep_alive: bool
    is_paused: bool

    def write(self, parts: list[bytes]) -> None:
        """Send bytes of the answer."""

    def finished(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def answer(self, answer: ControlAnswer) -> None:
        """Send an answer of the proxy's own."""

    def abort(self) -> None:
        """Break the connection, so that nobody takes what was sent for the whole."""


class Admission(Protocol):
    """Who decides whether a model may be asked for, and may end a request early."""

    def admit(self, model: str, abort: Callable[[], object]) -> Any:
        """Admit a request; None when there is no such model. `abort` ends it early."""

    def ended(self, use: Any) -> None:
        """A request that was admitted, by what `admit` returned for it, is over."""


class Everything:
    """Admits every model."""

    def admit(self, model: str, abort: Callable[[], object]) -> Any:
        """Admit a request."""
        return self

    def ended(self, use: Any) -> None:
        """It is over."""


class Forwarder:
    """Forwards completion requests.

    `on_lost` is told about a replica that has to go, `on_forgotten` about one that does not know a model it was asked
    for; it says whether the replica should have known it.
    """

    def __init__(
        self,
        router: Router,
        upstreams: Upstreams,
        health: ReplicaHealth,
        *,
        on_lost: Callable[[int], None],
        on_forgotten: Callable[[int, str], bool],
        admission: Admission | None = None,
    ) -> None:
        self.router = router
        self.upstreams = upstreams
        self.health = health
        self.on_lost = on_lost
        self.on_forgotten = on_forgotten
        self.admission: Admission = admission or Everything()
        self.keys = RequestKeys(DEFAULT_BLOCK_SIZE)
        self.outcomes = [Outcomes() for _ in upstreams.urls]
        self.unrouted = 0  # requests that came while no replica was in service
        self.moved = 0  # requests that were sent to a second replica
        self.authorization = upstreams.authorization  # what replicas get to see; None: the client's own

    @property
    def block_size(self) -> int:
        """Tokens per block of the replicas' KV cache."""
        return self.keys.block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        self.keys.block_size = size

    def forward(self, client: Client, request: Request) -> Exchange | None:
        """Start to forward a request; None when it was answered at once."""
        exchange = Exchange(self, client, request)
        return exchange if exchange.start() else None

    def head_for(self, head: RequestHead, replica: int, length: int) -> bytes:
        """A request's head as it goes to a replica."""
        if head.length is None:
            return outgoing_head(head, self.upstreams.pools[replica].address, length, self.authorization)
        written = head.outgoing.get(replica)
        if written is None:
            address = self.upstreams.pools[replica].address
            written = head.outgoing[replica] = outgoing_head(head, address, length, self.authorization)
        return written

    def blame(self, replica: int, status: int | None = None) -> None:
        """A replica did not answer (None), or with this status; it goes when that was too often."""
        has_to_go = self.health.failed(replica) if status is None else self.health.answered(replica, status)
        # The last replica is not sent away for errors it answers with: they tell the client more than none at all.
        is_spared = status is not None and len(self.router.routable) == 1
        if has_to_go and not is_spared and self.router.is_routable(replica):
            self.on_lost(replica)


class Exchange:
    """One request on its way: to one replica, to a second if the first fails before the client got a byte."""

    __slots__ = (
        "_begun",
        "_client",
        "_connection",
        "_forwarder",
        "_head",
        "_held",
        "_is_kept",
        "_key",
        "_moved",
        "_opening",
        "_request",
        "_resent",
        "_routed",
        "_sent_at",
        "_use",
    )

    def __init__(self, forwarder: Forwarder, client: Client, request: Request) -> None:
        self._forwarder = forwarder
        self._client = client
        self._request = request
        self._key = forwarder.keys.read(request.body)
        self._use: Any = None
        self._routed: Routed
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._head: AnswerHead | None = None
        self._held: list[bytes] | None = None  # an answer that is passed on when it is complete
        self._begun = False  # the client has got a part of the answer
        self._is_kept = self._resent = self._moved = False
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
            self._client.answer(_nobody())
            return False
        self._use = use
        self._send_to(routed)
        return True

    # What the replica's connection reports.

    def received(self, head: AnswerHead | None, data: bytes, *, complete: bool) -> None:
        """Bytes of the answer."""
        if head is not None:
            self._head = head
            if head.status in NOT_HERE and self._is_another_routable():
                self._forwarder.blame(self._routed.replica, head.status)
                self._give_up_connection()
                self._fail_over(f"HTTP {head.status}")
                return
            parts = [head.for_client(self._client.keep_alive), data]
            if not complete and head.length is not None and head.length <= HELD_BYTES:
                self._held = parts
                return
        elif self._held is not None:
            parts = self._held
            parts.append(data)
            if not complete:
                return
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
        return connection.time() - self._sent_at <= STALE_WITHIN_S

    def _is_forgotten(self, parts: list[bytes]) -> bool:
        """Whether the replica does not know an adapter it should know, and another one is asked instead."""
        assert self._head is not None
        if self._head.status != HTTPStatus.NOT_FOUND or self._begun or b"does not exist" not in b"".join(parts):
            return False
        if not self._forwarder.on_forgotten(self._routed.replica, self._key.model) or not self._is_another_routable():
            return False
        self._connection = None
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
            self._client.answer(_nobody())

    def _complete(self) -> None:
        assert self._head is not None
        self._connection = None
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


def _nobody() -> ControlAnswer:
    return error(HTTPStatus.SERVICE_UNAVAILABLE, "no replica is in service; see /health", RETRY_AFTER)
