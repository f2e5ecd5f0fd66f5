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
import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from rlkit.engines.parent_watch import exit_with_parent
from rlkit.errors import BadInput
from rlkit.serving.adapter_files import (
    CHUNK_BYTES,
    DIGEST_PATTERN,
    MAX_MANIFEST_BYTES,
    AdapterFile,
    Manifest,
    check_name,
    has_digest,
    read_manifest,
)
from rlkit.serving.bearer import Bearer, bearer_from

logger = logging.getLogger(__name__)

# Rank 512, vLLM's highest, on every linear layer of a 70 B model is about 13 GB in bfloat16; what is usual is a
# thousandth of it. The limit is there so that nobody fills the disk by mistake.
MAX_ADAPTER_BYTES = 16 * 1024**3

# The proxy deletes what no replica needs any more. This bounds what is left of runs that did not come to that.
MAX_ADAPTERS = 64

# One version at a time is pushed, and pushed again after a failure: more at once are not this proxy's.
MAX_UPLOADS = 4

# A sender that is alive sends something in this time.
IDLE_S = 30.0

_INCOMING = ".incoming-"


class Receiver:
    """Keeps adapters under `root`, one folder each; see `serve_receiver`."""

    def __init__(
        self,
        root: Path,
        bearer: Bearer,
        *,
        max_bytes: int = MAX_ADAPTER_BYTES,
        max_adapters: int = MAX_ADAPTERS,
        idle_s: float = IDLE_S,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.url = ""
        self._root = root.resolve()
        self._bearer = bearer
        self._max_bytes = max_bytes
        self._max_adapters = max_adapters
        self._idle_s = idle_s
        self._uploads = 0
        for leftover in self._root.glob(f"{_INCOMING}*"):
            shutil.rmtree(leftover, ignore_errors=True)

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
        digest = request.match_info["digest"]
        length = request.content_length
        if length is None:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "an adapter is sent with its length")
        if length > self._max_bytes:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes, at most {self._max_bytes} are taken")
        if length > shutil.disk_usage(self._root).free:
            raise _Refused(HTTPStatus.INSUFFICIENT_STORAGE, f"no room for {length} bytes in {self._root}")
        if self._uploads >= MAX_UPLOADS:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_UPLOADS} adapters are being sent already")
        self._uploads += 1
        incoming = self._root / f"{_INCOMING}{uuid.uuid4().hex}"
        try:
            incoming.mkdir()
            body = _Body(request, self._idle_s)
            manifest = await self._manifest(body, digest, length)
            for file in manifest.files:
                await _receive(body, file, incoming / file.name)
            await asyncio.to_thread(self._place, incoming, folder, manifest)
        except ConnectionError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the sender went away") from None
        except OSError as problem:
            _refuse_disk(problem)
        finally:
            self._uploads -= 1
            await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)
        logger.info("received %s: %d bytes", folder.relative_to(self._root), manifest.size)
        return web.json_response({"path": str(folder)})

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

    def _place(self, incoming: Path, folder: Path, manifest: Manifest) -> None:
        """Move a complete upload to its path; what is there already may only be the same."""
        folder.parent.mkdir(exist_ok=True)
        if folder.exists() and not has_digest(folder, manifest.digest):
            shutil.rmtree(folder)
        if not folder.exists():
            try:
                incoming.rename(folder)
            except OSError as problem:
                # Another upload of the same adapter was faster.
                if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        os.utime(folder)
        self._forget_the_oldest(folder)

    def _forget_the_oldest(self, newest: Path) -> None:
        folders = sorted(
            (folder for folder in self._root.glob("[!.]*/*") if folder != newest),
            key=lambda folder: folder.stat().st_mtime,
        )
        for folder in folders[: max(0, len(folders) + 1 - self._max_adapters)]:
            _delete(folder)

    async def _get(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        if not await asyncio.to_thread(has_digest, folder, request.match_info["digest"]):
            raise _Refused(HTTPStatus.NOT_FOUND, "not here")
        os.utime(folder)
        return web.json_response({"path": str(folder)})

    async def _delete(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(_delete, self._folder(request))
        return web.Response()

    def _folder(self, request: web.Request) -> Path:
        name, digest = request.match_info["name"], request.match_info["digest"]
        try:
            check_name(name)
        except BadInput as problem:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(problem)) from None
        if re.fullmatch(DIGEST_PATTERN[1:-1], digest) is None:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the digest is a SHA-256 in hexadecimal digits")
        return self._root / name / digest


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


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other versions are under that name, or nothing ever was
        folder.parent.rmdir()


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
    runner = web.AppRunner(receiver.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as problem:
            raise BadInput(f"port: cannot listen on {host}:{port}: {problem.strerror}") from None
        receiver.url = f"http://{host}:{runner.addresses[0][1]}"
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
        asyncio.run(_run_until_stopped(Receiver(options.root, bearer), options.host, options.port))
    except BadInput as problem:
        print(f"receiver: {problem}", file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        print(f"receiver: {options.root}: {problem.strerror}", file=sys.stderr)
        return BadInput.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
