"""What stands before a port of an emulated Job and passes everything on: the Jobs proxy, which asks for the token, and
the network between the Jobs of a group, which does not."""

from __future__ import annotations

import contextlib
import socket

import aiohttp
from aiohttp import web

HOP_BY_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"}


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Front:
    """Listens on a port of its own for one port of one Job; `token` None asks for none."""

    def __init__(self, target_port: int, token: str | None) -> None:
        self.url, self.refused, self.passed, self.is_down = "", 0, 0, False
        self._target, self._token = f"http://127.0.0.1:{target_port}", token

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; `url` is then the address."""
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port."""
        await self._session.close()
        await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            return web.json_response({"error": "made up by the test"}, status=503)
        if self._token is not None and request.headers.get("Authorization") != f"Bearer {self._token}":
            self.refused += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = await request.read()
        self.passed += 1
        try:
            async with self._session.request(
                request.method, self._target + str(request.rel_url), headers=headers, data=body
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                with contextlib.suppress(ConnectionError):
                    await response.write_eof()
                return response
        except aiohttp.ClientError:
            return web.json_response({"error": "the Job does not answer on this port"}, status=502)
