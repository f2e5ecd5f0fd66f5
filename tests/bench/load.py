"""A rollout worker's load: python tests/bench/load.py --url URL --connections N --requests M [--warm-up W]

N connections ask for completions of 4 KB prompts, in groups of eight with the same prompt and a seed each, as fast as
they are answered. After W requests it prints "ready" and waits for a line; then come the M that are measured, and one
line of JSON: seconds, errors, and latencies in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import uvloop

GROUP = 8

# With the fields TRL sends, this makes a body of 4 KB.
PROMPT_TOKENS = 640


def request_pool(host: str, groups: int) -> list[bytes]:
    """Requests as TRL's worker sends them, group by group."""
    dice = random.Random(0)
    template = list(range(100, 123))
    requests = []
    for _ in range(groups):
        prompt = template + [dice.randrange(10_000, 150_000) for _ in range(PROMPT_TOKENS - len(template))]
        for _ in range(GROUP):
            fields = {
                "model": "stub", "prompt": prompt, "max_tokens": 2048, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0,
                "seed": dice.getrandbits(63),
            }  # fmt: skip
            body = json.dumps(fields).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
                f"User-Agent: Python/3.11 aiohttp/3.14\r\nContent-Length: {len(body)}\r\n"
                "Content-Type: application/json\r\n\r\n"
            )
            requests.append(head.encode() + body)
    return requests


class Load:
    """Requests still to be sent, and how those that were sent ended."""

    def __init__(self, requests: list[bytes]) -> None:
        self.latencies: list[float] = []
        self.errors: list[str] = []
        self._requests = requests
        self._sent = 0
        self._total = 0
        self._resting: list[Worker] = []
        self._finished = asyncio.Event()

    async def send(self, total: int) -> None:
        """Send so many requests over all connections, and wait for their answers."""
        self.latencies, self.errors = [], []
        self._sent, self._total = 0, total
        self._finished.clear()
        resting, self._resting = self._resting, []
        for worker in resting:
            worker.go_on()
        await self._finished.wait()

    def next(self, worker: Worker) -> bytes | None:
        """The next request; None when there is none."""
        if self._sent == self._total:
            self._resting.append(worker)
            return None
        self._sent += 1
        return self._requests[(self._sent - 1) % len(self._requests)]

    def ended(self, seconds: float, error: str | None = None) -> None:
        """One request is over."""
        if error is None:
            self.latencies.append(seconds)
        else:
            self.errors.append(error)
        if len(self.latencies) + len(self.errors) >= self._total:
            self._finished.set()


class Worker(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._missing = 0  # bytes of the answer that have not come
        self._head = b""
        self._status = b""
        self._busy = False
        self._sent_at = 0.0

    def go_on(self) -> None:
        """Send the next request, if there is one."""
        request = self._load.next(self)
        if request is not None:
            self._busy = True
            self._sent_at = time.perf_counter()
            self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.go_on()

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            lowered = data[:end].lower()
            at = lowered.find(b"content-length:")
            self._status = data[9:12]
            self._missing = end + int(lowered[at + 15 : lowered.index(b"\r\n", at)])
            self._head = b""
        self._missing -= len(data)
        if self._missing == 0:
            self._busy = False
            error = None if self._status == b"200" else f"HTTP {self._status.decode()}"
            self._load.ended(time.perf_counter() - self._sent_at, error)
            self.go_on()

    def connection_lost(self, problem: Exception | None) -> None:
        if self._busy:
            self._load.ended(0.0, f"connection lost: {problem}")


async def run(url: str, connections: int, total: int, warm_up: int) -> dict[str, object]:
    """Send `total` requests over `connections` connections, after others that are not measured."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    load = Load(request_pool(parts.netloc, max(64, connections // 4)))
    loop = asyncio.get_running_loop()
    for first in range(0, connections, 256):  # a few at a time: a listening socket's queue is not endless
        await asyncio.gather(
            *(
                loop.create_connection(lambda: Worker(load), host, port)
                for _ in range(first, min(first + 256, connections))
            )
        )
    if warm_up:
        await load.send(warm_up)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    await load.send(total)
    seconds = time.perf_counter() - began
    centiles = statistics.quantiles(load.latencies, n=100) if len(load.latencies) > 1 else [0.0] * 99
    return {
        "seconds": seconds,
        "errors": len(load.errors),
        "first_error": load.errors[0] if load.errors else None,
        "median_ms": centiles[49] * 1000,
        "p99_ms": centiles[98] * 1000,
    }


def main() -> None:
    """Run the load and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    json.dump(uvloop.run(run(options.url, options.connections, options.requests, options.warm_up)), sys.stdout)


if __name__ == "__main__":
    main()
