"""The proxy's client side: a pool of connections to each replica for completions, one HTTP session for all else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlkit.serving.adapter_answers import Answer
from rlkit.serving.upstream_pool import CONNECT_TIMEOUT_S, KEEP_ALIVE_S, ConnectionPool, describe

# How often idle connections are looked at; they are kept for KEEP_ALIVE_S, the servers' own limit is a second more.
EXPIRE_EVERY_S = 0.5


class Upstreams:
    """Reaches replicas by number; an async context manager.

    `token` replaces whatever Authorization a request carries. Raises ValueError for a URL without a host.
    """

    def __init__(self, urls: list[str], token: str | None = None) -> None:
        self.urls = list(urls)
        self.resent = [0] * len(urls)  # requests sent again because a kept connection had been closed
        self.authorization = f"Bearer {token}" if token is not None else None
        # SSL_CERT_FILE and SSL_CERT_DIR name other authorities than the system's.
        self._tls = ssl.create_default_context()
        self.pools = [ConnectionPool(url, self._tls) for url in urls]
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Upstreams:
        self._session = aiohttp.ClientSession(
            # No limit on connections: a control request must not wait behind others.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        self._expire()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for pool in self.pools:
            pool.close()
        await self._session.close()

    def move(self, replica: int, url: str) -> None:
        """From now on a replica is at `url`; what waits for an answer from the old address is broken off."""
        left, self.pools[replica] = self.pools[replica], ConnectionPool(url, self._tls)
        self.urls[replica] = url
        left.break_off()

    async def ask(
        self,
        replica: int,
        method: str,
        path: str,
        timeout_s: float,
        json: Any = None,
        params: Mapping[str, str] | None = None,
    ) -> Answer:
        """One small request with its whole answer; whatever goes wrong is in the answer, too.

        A redirect is an answer like any other: a completion's would not be followed either.
        """
        headers = {"Authorization": self.authorization} if self.authorization is not None else {}
        url = self.urls[replica] + path
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, url, json=json, params=params, headers=headers, allow_redirects=False
                ) as response,
            ):
                # vLLM writes UTF-8. What a header says instead may be no text encoding at all.
                return Answer(response.status, (await response.read()).decode(errors="replace"))
        except TimeoutError:
            return Answer(None, f"no answer within {timeout_s:.0f} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            return Answer(None, describe(error))

    def _expire(self) -> None:
        for pool in self.pools:
            pool.expire()
        self._timer = asyncio.get_running_loop().call_later(EXPIRE_EVERY_S, self._expire)
