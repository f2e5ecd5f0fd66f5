"""The data path: one completion request to the replica the router chose, and its answer back.

Everything passes through unchanged: status, end-to-end headers, body, a stream chunk by chunk. What happened is counted
once per request, when it is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from rlkit.serving.control import ControlAnswer, error
from rlkit.serving.prompt_blocks import routing_key
from rlkit.serving.replica_health import Outcome, Outcomes, ReplicaHealth
from rlkit.serving.router import Router
from rlkit.serving.upstream import Upstreams, end_to_end

logger = logging.getLogger(__name__)

# vLLM's default on a GPU; only until a replica has said what it uses.
DEFAULT_BLOCK_SIZE = 16


@dataclass
class Forwarder:
    """Forwards completion requests.

    `on_lost` is told about a replica that stopped answering, `on_forgotten` about one that does not know an adapter it
    was asked for (by name).
    """

    router: Router
    upstreams: Upstreams
    health: ReplicaHealth
    on_lost: Callable[[int], None]
    on_forgotten: Callable[[int, str], None]
    block_size: int = DEFAULT_BLOCK_SIZE
    outcomes: list[Outcomes] = field(init=False)
    unrouted: int = 0  # requests that came while no replica was in service

    def __post_init__(self) -> None:
        self.outcomes = [Outcomes() for _ in self.upstreams.urls]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The handler of `/v1/completions` and `/v1/chat/completions`."""
        body = await request.read()
        key = routing_key(_decoded(body), self.block_size)
        routed = self.router.route(key.model, key.blocks, key.sequences)
        if routed is None:
            self.unrouted += 1
            return as_response(error(HTTPStatus.SERVICE_UNAVAILABLE, "no replica is in service; see /health"))
        outcome: Outcome = "failed"
        try:
            response, outcome = await self._forward(request, routed.replica, key.model, body)
            return response
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.router.release(routed)
            self.outcomes[routed.replica].count(outcome)

    async def _forward(
        self, request: web.Request, replica: int, model: str, body: bytes
    ) -> tuple[web.StreamResponse, Outcome]:
        response: web.StreamResponse | None = None
        try:
            async with self.upstreams.request(
                replica, request.method, request.path_qs, request.headers, body
            ) as upstream:
                if upstream.content_length is not None:
                    data = await upstream.read()
                    response = web.Response(status=upstream.status, headers=end_to_end(upstream.headers), body=data)
                    if upstream.status == HTTPStatus.NOT_FOUND and b"does not exist" in data:
                        self.on_forgotten(replica, model)
                else:
                    response = web.StreamResponse(status=upstream.status, headers=end_to_end(upstream.headers))
                    await response.prepare(request)
                    async for chunk in upstream.content.iter_any():
                        await _write(response, chunk)
                if self.health.answered(replica, upstream.status):
                    self.on_lost(replica)
                return response, _outcome(upstream.status)
        except (aiohttp.ClientError, OSError) as problem:
            logger.warning("replica %d: %s: %s", replica, type(problem).__name__, problem)
            if self.health.failed(replica):
                self.on_lost(replica)
            if response is not None and response.prepared:
                # Its beginning is with the client already: break the connection, so that nobody takes it for the whole.
                if request.transport is not None:
                    request.transport.abort()
                return response, "failed"
            reason = f"replica {replica} ({self.upstreams.urls[replica]}): {type(problem).__name__}: {problem}"
            return as_response(error(HTTPStatus.BAD_GATEWAY, reason)), "failed"


async def _write(response: web.StreamResponse, chunk: bytes) -> None:
    try:
        await response.write(chunk)
    except ConnectionError:
        # The client is gone, and the replica is not to blame. The handler is about to be cancelled for that reason.
        raise asyncio.CancelledError from None


def as_response(answer: ControlAnswer) -> web.Response:
    """The answer for aiohttp."""
    return web.Response(
        status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type, **answer.headers}
    )


def _outcome(status: int) -> Outcome:
    return "completed" if status < 400 else "refused" if status < 500 else "failed"


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong with it
