"""What the proxy is compared with: the proxy one writes first, on aiohttp, with the routing rule as it is published.

python tests/bench/plain_proxy.py --port PORT --replica URL --replica URL
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from rlkit.recipe import RoutingSection
from rlkit.serving.prompt_blocks import routing_key
from rlkit.serving.router import INDEX_CAPACITY

sys.path.append(str(Path(__file__).parents[1]))
from reference_router import ReferenceRouter

BLOCK_SIZE = 16
DROPPED = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}


class PlainProxy:
    """Reads a request, routes it, passes the answer on piece by piece."""

    def __init__(self, replicas: list[str], session: aiohttp.ClientSession) -> None:
        self._replicas = replicas
        self._session = session
        self._router = ReferenceRouter(len(replicas), RoutingSection().spill_threshold, INDEX_CAPACITY)
        for replica in range(len(replicas)):
            self._router.set_routable(replica, True)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """The handler of completions."""
        key = routing_key(await request.json(), BLOCK_SIZE)
        routed = self._router.route(key.model, key.blocks, key.sequences)
        assert routed is not None
        replica, _ = routed
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
            url = self._replicas[replica] + request.path_qs
            async with self._session.post(url, data=await request.read(), headers=headers) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
                response = web.StreamResponse(status=answer.status, headers=passed)
                response.content_length = answer.content_length
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response
        finally:
            self._router.in_flight[replica] -= key.sequences


async def serve(replicas: list[str], port: int) -> None:
    """Listen until killed."""
    connector = aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context())
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        app = web.Application(client_max_size=0)
        app.router.add_post("/v1/completions", PlainProxy(replicas, session).complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=8192).start()
        await asyncio.Event().wait()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replica", action="append", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.replica, options.port))


if __name__ == "__main__":
    main()
