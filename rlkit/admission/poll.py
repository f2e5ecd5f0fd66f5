"""The `/metrics` page of the servers, asked for over HTTP with a session of its own.

One page is enough: the proxy's holds every replica under a label, and a single server's is that server's. Nothing is
raised: a page that could not be had is None, and what that means is the law's to say.
"""

from __future__ import annotations

from types import TracebackType

import aiohttp

# A loaded server still answers within a second; a page that takes longer says nothing about now.
TIMEOUT_S = 5.0


class MetricsPoll:
    """Asks `base_url` for `/metrics`; an async context, because it owns its HTTP session.

    TRL's session is not borrowed: its connections are as many as rollouts may be in flight, and all of them are busy
    exactly when a reading matters.
    """

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url.rstrip('/')}/metrics"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> MetricsPoll:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def page(self) -> str | None:
        """The page's text, or None when there was no answer, or another one than 200."""
        assert self._session is not None, "used outside of its context"
        try:
            async with self._session.get(self._url) as response:
                return await response.text() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, UnicodeDecodeError):
            return None
