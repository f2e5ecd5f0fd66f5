from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_bench import PATIENCE_S, eventually

from rlkit.serving.adapter_files import Manifest, describe
from rlkit.serving.adapter_store import AdapterStore
from rlkit.serving.bearer import Bearer
from rlkit.serving.receiver import MAX_UPLOADS, Receiver, main, receiver_command, serve_receiver

Write = Callable[..., str]

TOKEN = "s3cret-of-the-receiver"
GOOD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "received"


@pytest.fixture
async def receiver(root: Path) -> AsyncIterator[Receiver]:
    async with serve_receiver(Receiver(AdapterStore(root), Bearer(TOKEN), max_bytes=100_000, idle_s=0.2)) as receiver:
        yield receiver


def body_of(folder: str) -> tuple[Manifest, bytes]:
    manifest = describe(Path(folder))
    return manifest, manifest.line + b"".join((Path(folder) / file.name).read_bytes() for file in manifest.files)


async def put(
    http: aiohttp.ClientSession, receiver: Receiver, digest: str, body: Any, name: str = "v1", **options: Any
) -> tuple[int, dict[str, Any]]:
    headers = options.pop("headers", GOOD)
    address = f"{receiver.url}/adapters/{name}/{digest}"
    async with http.put(address, data=body, headers=headers, **options) as response:
        return response.status, await response.json()


def left_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_what_is_put_is_kept_whole_under_its_digest(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write, root: Path
) -> None:
    folder = adapter("v1")
    manifest, body = body_of(folder)
    status, answer = await put(http, receiver, manifest.digest, body)
    assert (status, answer) == (200, {"path": str(root.resolve() / "v1" / manifest.digest)})
    assert describe(Path(answer["path"])) == manifest
    assert left_in(root) == [f"v1/{manifest.digest}/{file.name}" for file in manifest.files]
    async with http.get(f"{receiver.url}/adapters/v1/{manifest.digest}", headers=GOOD) as response:
        assert (response.status, await response.json()) == (200, answer)
    assert await put(http, receiver, manifest.digest, body) == (200, answer)  # again
    async with http.delete(f"{receiver.url}/adapters/v1/{manifest.digest}", headers=GOOD) as response:
        assert response.status == 200
    assert list(root.iterdir()) == []
    async with http.get(f"{receiver.url}/adapters/v1/{manifest.digest}", headers=GOOD) as response:
        assert response.status == 404


async def test_files_that_were_damaged_are_not_there_any_more(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write
) -> None:
    manifest, body = body_of(adapter("v1"))
    _, answer = await put(http, receiver, manifest.digest, body)
    weights = Path(answer["path"]) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    async with http.get(f"{receiver.url}/adapters/v1/{manifest.digest}", headers=GOOD) as response:
        assert response.status == 404
    assert (await put(http, receiver, manifest.digest, body))[0] == 200
    assert describe(Path(answer["path"])) == manifest


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
async def test_nothing_without_the_token(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write, root: Path, headers: dict[str, str]
) -> None:
    manifest, body = body_of(adapter("v1"))
    status, answer = await put(http, receiver, manifest.digest, body, headers=headers)
    assert (status, answer["error"]["message"]) == (401, "the bearer token is missing or wrong")
    address = f"{receiver.url}/adapters/v1/{manifest.digest}"
    for method in ("GET", "DELETE"):
        async with http.request(method, address, headers=headers) as response:
            assert response.status == 401
    assert left_in(root) == []
    async with http.get(f"{receiver.url}/health", headers=headers) as response:
        assert response.status == 200


async def test_what_is_refused_leaves_nothing_behind(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write, root: Path
) -> None:
    manifest, body = body_of(adapter("v1"))
    other = body[:-1] + bytes([body[-1] ^ 1])
    escape = manifest.line.replace(b"adapter_config.json", b"../adapter_config.j")
    digest = manifest.digest
    cases: list[tuple[int, str, str, bytes]] = [
        (422, "do not have the announced digest", digest, other),
        (422, "does not have the digest in the address", "0" * 64, body),
        (422, "the manifest adds up to", digest, body[:-1]),
        (422, "the manifest adds up to", digest, body + b"x"),
        (400, "manifest: files.0.name: String should match pattern", digest, escape + body[len(escape) :]),
        (400, "manifest: line: Invalid JSON", digest, b"\n" + body),
        (400, "no manifest line of at most", digest, b"x" * 50_000),
        (400, "the body ends before its time", digest, b"{}"),
        (413, "100001 bytes, at most 100000 are taken", digest, b"x" * 100_001),
    ]
    for expected, message, address, data in cases:
        status, answer = await put(http, receiver, address, data)
        assert (status, message in answer["error"]["message"]) == (expected, True), answer
    status, answer = await put(http, receiver, digest, body, name="-rf")
    assert (status, "lora_name" in answer["error"]["message"]) == (400, True)
    status, answer = await put(http, receiver, "abc", body)
    assert (status, answer["error"]["message"]) == (400, "the digest is a SHA-256 in hexadecimal digits")

    async def unmeasured() -> AsyncIterator[bytes]:
        yield body

    assert (await put(http, receiver, digest, unmeasured()))[0] == 411
    async with http.put(f"{receiver.url}/adapters/..%2f..%2fx/{digest}", data=body, headers=GOOD) as response:
        assert response.status in (400, 404)
    assert left_in(root) == []
    assert list(root.iterdir()) == []
    assert (await put(http, receiver, digest, body))[0] == 200


async def test_a_sender_that_stops_or_goes_away_is_given_up(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write, root: Path
) -> None:
    manifest, body = body_of(adapter("v1"))
    for ends in ("stops", "goes"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(receiver.url.rsplit(":", 1)[1]))
        head = (
            f"PUT /adapters/v1/{manifest.digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body[:-10])
        await writer.drain()
        await eventually(lambda: len(left_in(root)) == 2)
        if ends == "stops":
            assert b" 408 " in await reader.readline()
        writer.close()
        await eventually(lambda: list(root.iterdir()) == [])
    assert (await put(http, receiver, manifest.digest, body))[0] == 200


async def test_a_few_uploads_at_once_and_no_more(
    receiver: Receiver, http: aiohttp.ClientSession, adapter: Write, root: Path
) -> None:
    manifest, body = body_of(adapter("v1"))
    may_end = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield body[:-1]
        await may_end.wait()
        yield body[-1:]

    headers = GOOD | {"Content-Length": str(len(body))}
    uploads = [
        asyncio.create_task(put(http, receiver, manifest.digest, slow(), headers=headers)) for _ in range(MAX_UPLOADS)
    ]
    await eventually(lambda: len(list(root.iterdir())) == MAX_UPLOADS)
    status, _ = await put(http, receiver, manifest.digest, body)
    assert status == 503
    may_end.set()
    # All of them were the same adapter: it is there once.
    assert [status for status, _ in await asyncio.gather(*uploads)] == [200] * MAX_UPLOADS
    assert left_in(root) == [f"v1/{manifest.digest}/{file.name}" for file in manifest.files]


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EROFS, 500)])
async def test_a_disk_that_takes_nothing(
    receiver: Receiver,
    http: aiohttp.ClientSession,
    adapter: Write,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
) -> None:
    def fail(store: AdapterStore, incoming: Path, folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(AdapterStore, "place", fail)
    manifest, body = body_of(adapter("v1"))
    answer = await put(http, receiver, manifest.digest, body)
    assert (answer[0], os.strerror(number) in answer[1]["error"]["message"]) == (status, True)
    assert list(root.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
    assert (await put(http, receiver, manifest.digest, body))[0] == 507


def test_the_oldest_go_when_there_are_too_many(adapter: Write, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", max_adapters=2)
    folders = []
    for version in (1, 2, 3):
        digest = describe(Path(adapter("a", weights=float(version)))).digest
        with store.incoming() as incoming:
            shutil.copytree(adapter("a", weights=float(version)), incoming, dirs_exist_ok=True)
            folders.append(store.folder(f"v{version}", digest))
            store.place(incoming, folders[-1])
        os.utime(folders[-1], (version, version))
        if version == 2:
            assert store.has(folders[0])  # it was asked for: the other one is the oldest now
    assert [folder.is_dir() for folder in folders] == [True, False, True]
    assert not folders[1].parent.exists()


def test_only_adapters_count_and_go(adapter: Write, tmp_path: Path) -> None:
    others = [tmp_path / "store" / f"project-{number}" / "src" for number in range(3)]
    for other in others:
        other.mkdir(parents=True)
    store = AdapterStore(tmp_path / "store", max_adapters=2)
    folders = []
    for version in (1, 2):
        digest = describe(Path(adapter("a", weights=float(version)))).digest
        with store.incoming() as incoming:
            shutil.copytree(adapter("a", weights=float(version)), incoming, dirs_exist_ok=True)
            folders.append(store.folder(f"v{version}", digest))
            store.place(incoming, folders[-1])
    assert all(folder.is_dir() for folder in [*others, *folders])


def test_leftovers_of_an_upload_go_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".incoming-abc").mkdir()
    (tmp_path / ".incoming-abc" / "half").touch()
    AdapterStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_process_receives_until_sigterm(http: aiohttp.ClientSession, adapter: Write, root: Path) -> None:
    command = receiver_command(root, "A_TOKEN", port=0)
    assert TOKEN not in " ".join(command)
    environment = {**os.environ, "A_TOKEN": TOKEN}
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            line = await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]
            url = line.removeprefix("receiver: ").strip()
            manifest, body = body_of(adapter("v1"))
            async with http.put(f"{url}/adapters/v1/{manifest.digest}", data=body, headers=GOOD) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            out, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert f"received v1/{manifest.digest}" in err
    assert TOKEN not in out + err


def test_bad_starts_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--root", str(tmp_path), "--token-env", "A_TOKEN", "--outlives-parent"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == "receiver: --token-env: the environment variable A_TOKEN is not set\n"
    monkeypatch.setenv("A_TOKEN", "two\nlines")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "A_TOKEN does not hold a token" in error
    assert "lines" not in error
    (tmp_path / "file").touch()
    monkeypatch.setenv("A_TOKEN", TOKEN)
    assert main(["--root", str(tmp_path / "file"), *arguments[2:]]) == 2
    assert capsys.readouterr().err == f"receiver: {tmp_path / 'file'}: File exists\n"


def test_a_bearer_shows_its_token_to_nobody() -> None:
    bearer = Bearer(TOKEN)
    assert TOKEN not in f"{bearer} {bearer!r} {[bearer]}"
    assert bearer.accepts(f"Bearer {TOKEN}")
    assert bearer.accepts(f"bearer {TOKEN}")
    for header in (None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN} ", f"Bearer {TOKEN}x", "Bearer é\udcff"):
        assert not bearer.accepts(header)
