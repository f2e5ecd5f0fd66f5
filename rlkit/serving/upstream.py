"""The proxy's client side: one HTTP session to all replicas."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.payload import TOO_LARGE_BYTES_BODY
from multidict import CIMultiDict

from rlkit.serving.adapter_answers import Answer

# A replica's socket is up before its first answer, so a connection is made at once or not at all; 10 s allow for a
# machine whose cores are all busy. There is no other limit: generation takes as long as it takes, the client decides.
CONNECT_TIMEOUT_S = 10.0

# uvicorn closes a connection after 5 s without a request (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); ours goes first.
KEEP_ALIVE_S = 4.0

# A connection that was closed before the request came says so within a round trip. One that breaks later had a request
# that ran, and running it twice would add load where there is too much of it already.
STALE_WITHIN_S = 2.0

# RFC 9110 section 7.6.1: these concern one connection. Host and length are written anew for the next one.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class Upstreams:
    """Sends requests to replicas by number; an async context manager.

    `token` replaces whatever Authorization a request carries.
    """

    def __init__(self, urls: list[str], token: str | None = None) -> None:
        self.urls = urls
        self.resent = [0] * len(urls)  # requests sent again because a kept connection had been closed
        self._token = token

    async def __aenter__(self) -> Upstreams:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            # No limit on connections: what runs at once is decided by the clients, a wait here would only hide it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            # Bodies pass through as they are, so only the client may say which encodings it reads.
            auto_decompress=False,
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
            trace_configs=[trace],
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(
        self, replica: int, method: str, path_qs: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, open until its answer has been read. Raises aiohttp.ClientError when there is none.

        A kept connection may have been closed by the server at the moment it is used again; then, and only then, the
        request is sent a second time.
        """
        response = await self._send(replica, method, path_qs, self._outgoing(headers), body)
        try:
            yield response
        finally:
            # A connection whose answer was not read to the end is closed, which tells vLLM to stop generating.
            response.release()

    async def ask(
        self,
        replica: int,
        method: str,
        path: str,
        timeout_s: float,
        json: Any = None,
        params: Mapping[str, str] | None = None,
    ) -> Answer:
        """One small request with its whole answer; whatever goes wrong is in the answer, too."""
        headers = self._outgoing({})
        if json is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.urls[replica] + path, json=json, params=params, headers=headers
                ) as response,
            ):
                return Answer(response.status, await response.text(errors="replace"))
        except TimeoutError:
            return Answer(None, f"no answer within {timeout_s:.0f} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            return Answer(None, f"{type(error).__name__}: {error}")

    async def _send(
        self, replica: int, method: str, path_qs: str, headers: CIMultiDict[str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        url = self.urls[replica] + path_qs
        used = SimpleNamespace(kept=False)
        sent_at = asyncio.get_running_loop().time()
        try:
            return await self._session.request(method, url, headers=headers, data=_data(body), trace_request_ctx=used)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not used.kept or asyncio.get_running_loop().time() - sent_at > STALE_WITHIN_S:
                raise
        self.resent[replica] += 1
        return await self._session.request(method, url, headers=headers, data=_data(body))

    def _outgoing(self, headers: Mapping[str, str]) -> CIMultiDict[str]:
        outgoing = end_to_end(headers)
        if self._token is not None:
            outgoing["Authorization"] = f"Bearer {self._token}"
        return outgoing


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that are passed on."""
    listed = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP and name.lower() not in listed
    )


def _data(body: bytes | None) -> bytes | io.BytesIO | None:
    # aiohttp writes bytes in one go, and warns above this size that the event loop stands still meanwhile.
    return io.BytesIO(body) if body is not None and len(body) > TOO_LARGE_BYTES_BODY else body


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.kept = True
