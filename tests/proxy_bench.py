"""What the proxy's tests share: a proxy over emulated replicas with short periods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from rlkit.recipe import TransportSection
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.proxy import Proxy, serve
from rlkit.serving.proxy_config import ProxyConfig

PROMPT = list(range(135))
POLICY = "trl-policy-v1"

# Every replica is local and answers at once: what is waited for comes within this, or never.
PATIENCE_S = 20.0


@dataclass
class ProxyBench:
    """A running proxy, its replicas, and a client of it."""

    proxy: Proxy
    replicas: Sequence[EmulatedReplica]
    session: aiohttp.ClientSession

    async def post(self, path: str, json: Any = None, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.proxy.url + path, json=json, **options) as response:
            return response.status, await decoded(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.proxy.url + path) as response:
            return response.status, await decoded(response)

    async def complete(self, model: str = "emulated", prompt: object = PROMPT, **more: Any) -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "seed": 1, "return_token_ids": True, "logprobs": 0}
        return await self.post("/v1/completions", body | more)

    async def load(self, path: str, name: str = POLICY) -> tuple[int, Any]:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": False})

    async def in_service(self, *replicas: int) -> None:
        """Wait until these replicas (by default all) get requests."""
        wanted = replicas or range(len(self.replicas))
        await eventually(lambda: all(self.proxy.registry.serves(replica) for replica in wanted))


@asynccontextmanager
async def proxied(
    replicas: Sequence[EmulatedReplica], retry_s: float = 0.01, deadline_s: float = 5.0, **options: Any
) -> AsyncIterator[ProxyBench]:
    """A proxy in front of emulated replicas, all of them in service."""
    options.setdefault("transport", TransportSection(retry_s=retry_s, deadline_s=deadline_s))
    config = ProxyConfig(replicas=[replica.url for replica in replicas], **options)
    async with serve(config) as proxy, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bench = ProxyBench(proxy, replicas, session)
        await bench.in_service()
        yield bench


async def decoded(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else await response.text()


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
