"""The proxy's side of the push transport: an adapter's files to the receivers beside the replicas."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from rlkit.errors import BadInput
from rlkit.serving.adapter_answers import Answer, pushed_path
from rlkit.serving.adapter_files import CHUNK_BYTES, Manifest, check_name
from rlkit.serving.adapter_manifests import AdapterManifests
from rlkit.serving.bearer import Bearer
from rlkit.serving.upstream_pool import describe

# As for the replicas: a receiver's socket is up before its first answer.
CONNECT_TIMEOUT_S = 10.0


class AdapterPush:
    """Pushes adapters to receivers by number, which are the replicas' own; an async context manager.

    What an adapter consists of is read once per load and stands for it from then on: a folder that holds something else
    by the time a replica needs it again is refused, not served.
    """

    def __init__(self, urls: list[str], bearer: Bearer) -> None:
        self._urls = list(urls)
        self._bearer = bearer
        self._manifests = AdapterManifests()

    async def __aenter__(self) -> AdapterPush:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Authorization": self._bearer.header},
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    def move(self, replica: int, url: str) -> None:
        """From now on a replica's receiver is at `url`."""
        self._urls[replica] = url

    async def push(self, replica: int, name: str, path: str, serial: int, timeout_s: float) -> Answer:
        """Bring the files in the folder `path` to one receiver; the answer says where they are there.

        Files that are there already, whole and the same, are not sent again.
        """
        try:
            check_name(name)
            async with asyncio.timeout(timeout_s):
                manifest = await self._manifests.of(name, serial, path)
                address = f"{self._urls[replica]}/adapters/{name}/{manifest.digest}"
                found = await self._ask("GET", address)
                if pushed_path(found) is not None:
                    return found
                return await self._send(address, manifest, Path(path))
        except TimeoutError:
            return Answer(None, f"no answer within {timeout_s:.3g} s", timed_out=True)
        except BadInput as problem:
            return _refusal(str(problem))
        except (aiohttp.ClientError, OSError) as problem:
            return _changed(problem) or Answer(None, describe(problem))

    async def discard(self, replica: int, path: str, timeout_s: float) -> Answer:
        """Delete what a push brought to `path`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask("DELETE", f"{self._urls[replica]}/adapters/{'/'.join(Path(path).parts[-2:])}")
        except TimeoutError:
            return Answer(None, f"no answer within {timeout_s:.3g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as problem:
            return Answer(None, describe(problem))

    def forget(self, name: str) -> None:
        """Nobody will ask for this adapter again."""
        self._manifests.forget(name)

    async def _send(self, address: str, manifest: Manifest, folder: Path) -> Answer:
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(manifest.line) + manifest.size),
        }
        return await self._ask("PUT", address, data=_contents(manifest, folder), headers=headers)

    async def _ask(self, method: str, address: str, **options: Any) -> Answer:
        async with self._session.request(method, address, **options) as response:
            return Answer(response.status, (await response.read()).decode(errors="replace"))


class _Changed(OSError):
    """A file is not what the manifest says any more."""


async def _contents(manifest: Manifest, folder: Path) -> AsyncIterator[bytes]:
    yield manifest.line
    for file in manifest.files:
        found, left = hashlib.sha256(), file.size
        with (folder / file.name).open("rb") as stream:
            while left:
                piece = await asyncio.to_thread(stream.read, min(left, CHUNK_BYTES))
                left -= len(piece)
                found.update(piece)
                if not piece or (not left and found.hexdigest() != file.sha256):
                    raise _Changed(f"{folder / file.name}: not what it was when the adapter was loaded")
                yield piece


def _changed(problem: BaseException) -> Answer | None:
    """The refusal in a failed upload whose cause is here and not at the receiver."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, _Changed | FileNotFoundError):
            return _refusal(str(seen))
        seen = seen.__cause__ or seen.__context__
    return None


def _refusal(reason: str) -> Answer:
    return Answer(HTTPStatus.BAD_REQUEST, json.dumps({"error": {"message": reason}}))
