"""The receiver beside a vLLM server: takes an adapter's files over HTTP and keeps them on the local disk.

A new policy then needs no mount that both sides share, nor the seconds until such a mount shows what was written. The
proxy sends (`rlkit.serving.adapter_push`), this side checks and answers with the local path that vLLM loads:

    PUT    /adapters/<name>/<digest>    a manifest line, then the files' bytes in its order -> {"path": ...}
    GET    /adapters/<name>/<digest>    {"path": ...} when the files are here, checked again; else 404
    DELETE /adapters/<name>/<digest>    delete them
    GET    /health                      200

Every request but the last needs the bearer token. An adapter appears under its path whole or not at all.
`python -m rlkit.serving.receiver --root DIR --token-env NAME` runs one as a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from rlkit.engines.parent_watch import exit_with_parent
from rlkit.errors import BadInput
from rlkit.serving.adapter_files import CHUNK_BYTES, MAX_MANIFEST_BYTES, AdapterFile, Manifest, read_manifest
from rlkit.serving.adapter_store import AdapterStore
from rlkit.serving.bearer import Bearer, bearer_from
from rlkit.serving.listening import base_url, cannot_listen

logger = logging.getLogger(__name__)

# Rank 512, vLLM's highest, on every linear layer of a 70 B model is about 13 GB in bfloat16; what is usual is a
# thousandth of it. The limit is there so that nobody fills the disk by mistake.
MAX_ADAPTER_BYTES = 16 * 1024**3

# One version at a time is pushed, and pushed again after a failure: more at once are not this proxy's.
MAX_UPLOADS = 4

# A sender that is alive sends something in this time.
IDLE_S = 30.0

# What a stopping receiver leaves an upload to end. A sender that is cut off asks again.
SHUTDOWN_S = 1.0


class Receiver:
    """Takes adapters into a store; see `serve_receiver`."""

    def __init__(
        self, store: AdapterStore, bearer: Bearer, *, max_bytes: int = MAX_ADAPTER_BYTES, idle_s: float = IDLE_S
    ) -> None:
        self.url = ""
        self._store = store
        self._bearer = bearer
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._uploads = 0

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", _health),
                web.put("/adapters/{name}/{digest}", self._put),
                web.get("/adapters/{name}/{digest}", self._get, allow_head=False),
                web.delete("/adapters/{name}/{digest}", self._delete),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != "/health" and not self._bearer.accepts(request.headers.get("Authorization")):
            return _error(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong")
        try:
            return await handler(request)
        except _Refused as refused:
            return _error(refused.status, str(refused))
        except web.HTTPException as problem:
            return _error(HTTPStatus(problem.status), problem.reason)

    async def _put(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        length = request.content_length
        if length is None:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "an adapter is sent with its length")
        if length > self._max_bytes:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes, at most {self._max_bytes} are taken")
        if length > self._store.free_bytes():
            raise _Refused(HTTPStatus.INSUFFICIENT_STORAGE, f"no room for {length} bytes in {self._store.root}")
        if self._uploads >= MAX_UPLOADS:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_UPLOADS} adapters are being sent already")
        self._uploads += 1
        try:
            await self._take(_Body(request, self._idle_s), folder, length)
        except ConnectionError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the sender went away") from None
        except OSError as problem:
            _refuse_disk(problem)
        finally:
            self._uploads -= 1
        logger.info("received %s: %d bytes", folder.relative_to(self._store.root), length)
        return web.json_response({"path": str(folder)})

    async def _take(self, body: _Body, folder: Path, length: int) -> None:
        manifest = await self._manifest(body, folder.name, length)
        with self._store.incoming() as incoming:
            for file in manifest.files:
                await _receive(body, file, incoming / file.name)
            await asyncio.to_thread(self._store.place, incoming, folder)

    async def _manifest(self, body: _Body, digest: str, length: int) -> Manifest:
        line = await body.line(MAX_MANIFEST_BYTES)
        try:
            manifest = read_manifest(line)
        except BadInput as problem:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(problem)) from None
        if manifest.line != line or manifest.digest != digest:
            raise _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "the manifest does not have the digest in the address")
        if len(line) + manifest.size != length:
            reason = f"{length} bytes are announced and the manifest adds up to {len(line) + manifest.size}"
            raise _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, reason)
        return manifest

    async def _get(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        if not await asyncio.to_thread(self._store.has, folder):
            raise _Refused(HTTPStatus.NOT_FOUND, "not here")
        return web.json_response({"path": str(folder)})

    async def _delete(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._store.delete, self._folder(request))
        return web.Response()

    def _folder(self, request: web.Request) -> Path:
        try:
            return self._store.folder(request.match_info["name"], request.match_info["digest"])
        except BadInput as problem:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(problem)) from None


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Body:
    """A request's body in pieces; a sender that stops sending is refused."""

    def __init__(self, request: web.Request, idle_s: float) -> None:
        self._request = request
        self._idle_s = idle_s
        self._kept = b""

    async def line(self, limit: int) -> bytes:
        while b"\n" not in self._kept and len(self._kept) <= limit:
            self._kept += await self._more()
        line, end, self._kept = self._kept.partition(b"\n")
        if not end or len(line) >= limit:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"no manifest line of at most {limit} bytes")
        return line + end

    async def pieces(self, size: int) -> AsyncIterator[bytes]:
        while size:
            if not self._kept:
                self._kept = await self._more()
            piece, self._kept = self._kept[:size], self._kept[size:]
            size -= len(piece)
            yield piece

    async def _more(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_s):
                piece = await self._request.content.read(CHUNK_BYTES)
        except TimeoutError:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"nothing came for {self._idle_s:g} s") from None
        if not piece:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body ends before its time")
        return piece


async def _receive(body: _Body, file: AdapterFile, path: Path) -> None:
    found = hashlib.sha256()
    with path.open("xb") as stream:
        async for piece in body.pieces(file.size):
            found.update(piece)
            stream.write(piece)
    if found.hexdigest() != file.sha256:
        raise _Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"{file.name}: the bytes do not have the announced digest")


def _refuse_disk(problem: OSError) -> NoReturn:
    is_full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    status = HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.INTERNAL_SERVER_ERROR
    raise _Refused(status, f"cannot write the adapter: {problem.strerror}") from None


def _error(status: HTTPStatus, message: str) -> web.Response:
    response = web.json_response({"error": {"message": message, "code": int(status)}}, status=status)
    if status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.NOT_FOUND:
        # The rest of a refused upload is not read.
        response.force_close()
    return response


async def _health(request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def serve_receiver(receiver: Receiver, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Receiver]:
    """Run a receiver; inside the context it listens on `receiver.url`. Raises BadInput when it cannot."""
    runner = web.AppRunner(receiver.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, UnicodeError) as problem:
            raise cannot_listen(host, port, problem) from None
        receiver.url = base_url(host, runner.addresses[0][1])
        yield receiver
    finally:
        await runner.cleanup()


async def _run_until_stopped(receiver: Receiver, host: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve_receiver(receiver, host, port):
        print(f"receiver: {receiver.url}", flush=True)
        await stopped.wait()


def receiver_command(root: Path, token_env: str, port: int, host: str = "127.0.0.1") -> list[str]:
    """The argument list that runs a receiver; the token is in the environment variable `token_env`."""
    return [
        *(sys.executable, "-m", "rlkit.serving.receiver", "--root", str(root), "--token-env", token_env),
        *("--host", host, "--port", str(port)),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run a receiver until SIGTERM, SIGINT or the end of its parent; exit code 2 for a bad configuration."""
    parser = argparse.ArgumentParser(prog="python -m rlkit.serving.receiver", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="where adapters are kept")
    parser.add_argument("--token-env", required=True, help="environment variable with the bearer token to ask for")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--outlives-parent", action="store_true", help="go on when the process that started it is gone")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        bearer = bearer_from(options.token_env, "--token-env")
        assert bearer is not None
        if not options.outlives_parent:
            exit_with_parent()
        asyncio.run(_run_until_stopped(Receiver(AdapterStore(options.root), bearer), options.host, options.port))
    except BadInput as problem:
        print(f"receiver: {problem}", file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        print(f"receiver: {options.root}: {problem.strerror}", file=sys.stderr)
        return BadInput.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
