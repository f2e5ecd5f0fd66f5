"""Replicas that answer at once: python tests/bench/stub_replicas.py --replicas 2 [--tls CERTIFICATE KEY]

Prints one base URL a line. They know just enough of vLLM for a proxy to take them into service. GET /set?bytes=N&gate=M
on any of them: completions are answered with a body of N bytes, and only once M of them wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
from typing import cast
from urllib.parse import parse_qsl

import uvloop

CARD = {"id": "stub", "object": "model", "root": "stub", "parent": None, "max_model_len": 4096}
CONTROL = {
    b"/v1/models": {"object": "list", "data": [CARD]},
    b"/reset_prefix_cache": {"success": True},
}


def whole(body: bytes) -> bytes:
    """A complete answer."""
    head = "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    return f"{head}content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n".encode() + body


class Replicas:
    """What all replicas of this process share."""

    def __init__(self) -> None:
        self.answer = b""
        self.gate = 0
        self.waiting: list[asyncio.Transport] = []
        self.set_size(30_000)

    def set_size(self, size: int) -> None:
        """Completions have bodies of this many bytes."""
        frame = json.dumps({"id": "cmpl-0", "object": "text_completion", "choices": [{"text": ""}]})
        self.answer = whole(frame.replace('""', '"' + "x" * (size - len(frame)) + '"').encode())

    def complete(self, transport: asyncio.Transport) -> None:
        """Answer a completion, now or with the others that wait."""
        if not self.gate:
            transport.write(self.answer)
            return
        self.waiting.append(transport)
        if len(self.waiting) >= self.gate:
            for one in self.waiting:
                one.write(self.answer)
            self.waiting.clear()


class Connection(asyncio.Protocol):
    """One connection; what comes in is trusted to be requests with a Content-Length."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            at = data[:end].lower().find(b"content-length:")
            length = int(data[at + 15 : data.index(b"\r\n", at)]) if at >= 0 else 0
            if len(data) < end + length:
                break
            self._answer(data[: data.index(b"\r\n")].split(b" ")[1])
            data = data[end + length :]
        self._received = data

    def _answer(self, target: bytes) -> None:
        path, _, query = target.partition(b"?")
        if path == b"/v1/completions":
            self._replicas.complete(self._transport)
            return
        if path == b"/set":
            wanted = dict(parse_qsl(query.decode()))
            self._replicas.set_size(int(wanted["bytes"]))
            self._replicas.gate = int(wanted["gate"])
        self._transport.write(whole(json.dumps(CONTROL.get(path, {})).encode()))


async def serve(count: int, tls: ssl.SSLContext | None) -> None:
    """Listen on `count` free ports and print them, until killed."""
    replicas = Replicas()
    loop = asyncio.get_running_loop()
    scheme = "https" if tls is not None else "http"
    for _ in range(count):
        server = await loop.create_server(lambda: Connection(replicas), "127.0.0.1", 0, ssl=tls, backlog=8192)
        port = server.sockets[0].getsockname()[1]
        print(f"{scheme}://{'localhost' if tls is not None else '127.0.0.1'}:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"))
    options = parser.parse_args()
    tls = None
    if options.tls:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*options.tls)
    uvloop.run(serve(options.replicas, tls))


if __name__ == "__main__":
    main()
