from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from proxy_bench import POLICY, ProxyBench, eventually, proxied

from rlkit.recipe import TransportSection
from rlkit.serving.adapter_answers import Meaning, message_of, push_meaning, pushed_path
from rlkit.serving.adapter_files import describe
from rlkit.serving.adapter_push import AdapterPush
from rlkit.serving.adapter_store import AdapterStore
from rlkit.serving.bearer import Bearer
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.receiver import Receiver, serve_receiver

Write = Callable[..., str]
Replicas = list[EmulatedReplica]

TOKEN = "s3cret-of-the-receivers"


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[Receiver]:
    async with serve_receiver(Receiver(AdapterStore(tmp_path / "received"), Bearer(TOKEN))) as receiver:
        yield receiver


@pytest.fixture
async def push(receiver: Receiver) -> AsyncIterator[AdapterPush]:
    async with AdapterPush([receiver.url], Bearer(TOKEN)) as push:
        yield push


async def test_a_push_brings_the_files_and_says_where_they_are(push: AdapterPush, adapter: Write) -> None:
    path = adapter("v1")
    answer = await push.push(0, "v1", path, 1, 10.0)
    assert push_meaning(answer) is Meaning.DONE
    where = Path(pushed_path(answer) or "")
    assert where != Path(path)
    assert describe(where) == describe(Path(path))
    assert (await push.discard(0, str(where), 10.0)).status == 200
    assert not where.exists()


async def test_files_that_are_there_are_not_sent_again(push: AdapterPush, adapter: Write) -> None:
    path = adapter("v1")
    first = await push.push(0, "v1", path, 1, 10.0)
    (Path(path) / "adapter_model.safetensors").unlink()  # nothing is read from here any more
    assert await push.push(0, "v1", path, 1, 10.0) == first


async def test_an_adapter_stays_what_it_was_when_it_was_loaded(push: AdapterPush, adapter: Write) -> None:
    """A trainer that starts over writes other weights to the same path, before it asks to load them."""
    path = adapter("v1", weights=1.0)
    where = pushed_path(await push.push(0, "v1", path, 1, 10.0))
    assert where is not None
    shutil.rmtree(where)  # the replica lost its disk
    adapter("v1", weights=2.0)
    answer = await push.push(0, "v1", path, 1, 10.0)
    assert push_meaning(answer) is Meaning.FINAL
    assert message_of(answer).endswith("adapter_model.safetensors: not what it was when the adapter was loaded")
    assert not Path(where).exists()
    shutil.rmtree(path)
    answer = await push.push(0, "v1", path, 1, 10.0)
    assert (push_meaning(answer), "No such file" in message_of(answer)) == (Meaning.FINAL, True)
    path = adapter("v1", weights=2.0)
    push.forget("v1")
    where = pushed_path(await push.push(0, "v1", path, 2, 10.0))
    assert describe(Path(where or "")) == describe(Path(path))


async def test_what_no_time_mends_is_final(push: AdapterPush, receiver: Receiver, adapter: Write) -> None:
    for name, path, message in (
        ("v1", "/nowhere", "/nowhere: cannot read the adapter: No such file or directory"),
        ("v1", "/no\0where", "'/no\\x00where': not a path"),
        ("v1", "/\ud800", "'/\\ud800': not a path"),
        ("a/b", adapter("v1"), "lora_name: 'a/b': only letters"),
    ):
        answer = await push.push(0, name, path, 1, 10.0)
        assert push_meaning(answer) is Meaning.FINAL
        assert message_of(answer).startswith(message)
    async with AdapterPush([receiver.url], Bearer("wrong")) as stranger:
        answer = await stranger.push(0, "v1", adapter("v1"), 1, 10.0)
        assert (push_meaning(answer), answer.status) == (Meaning.FINAL, 401)
    # A folder that was not there the first time is read again.
    assert push_meaning(await push.push(0, "v1", adapter("v1"), 1, 10.0)) is Meaning.DONE


async def test_a_receiver_that_does_not_answer_is_asked_again(adapter: Write) -> None:
    connections: list[asyncio.StreamWriter] = []

    def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with AdapterPush([address], Bearer(TOKEN)) as push:
        answer = await push.push(0, "v1", adapter("v1"), 1, 0.05)
        assert (answer.status, answer.timed_out, push_meaning(answer)) == (None, True, Meaning.RETRY)
        assert (await push.discard(0, "/x/v1/0", 0.05)).timed_out
        server.close()
        for connection in connections:
            connection.close()
        await server.wait_closed()
        answer = await push.push(0, "v1", adapter("v1"), 1, 10.0)
        assert (answer.status, push_meaning(answer)) == (None, Meaning.RETRY)
        assert TOKEN not in answer.text


@asynccontextmanager
async def pushing(
    replicas: Replicas, folder: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float = 5.0
) -> AsyncIterator[tuple[ProxyBench, list[Path]]]:
    """A proxy that pushes, with a receiver beside each replica; the receivers' folders."""
    monkeypatch.setenv("RECEIVERS", TOKEN)
    folders = [folder / f"beside-{number}" for number in range(len(replicas))]
    async with AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(serve_receiver(Receiver(AdapterStore(folder), Bearer(TOKEN))))
            for folder in folders
        ]
        bench = await stack.enter_async_context(
            proxied(
                replicas,
                transport=TransportSection(kind="push", retry_s=0.01, deadline_s=deadline_s),
                receivers=[receiver.url for receiver in receivers],
                receiver_token_env="RECEIVERS",
            )
        )
        yield bench, folders


async def test_replicas_load_from_their_own_disks(
    replicas: Replicas, adapter: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in replicas:
        replica.faults.mount, replica.faults.mount_lag_s = tmp_path / "trainer", 1e6  # a mount that shows nothing
    async with pushing(replicas, tmp_path, monkeypatch) as (bench, folders):
        path = adapter(f"trainer/{POLICY}")
        assert await bench.load(path) == (200, f"Success: LoRA adapter '{POLICY}' added successfully.")
        digest = describe(Path(path)).digest
        assert [replica.engine.adapters[POLICY].path for replica in replicas] == [
            str(folder.resolve() / POLICY / digest) for folder in folders
        ]
        assert (await bench.complete(POLICY))[0] == 200


async def test_versions_go_one_sync_late_and_a_new_disk_is_filled_again(
    replicas: Replicas, adapter: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushing(replicas, tmp_path, monkeypatch) as (bench, folders):
        for version in (1, 2, 3):
            name = f"trl-policy-v{version}"
            assert (await bench.load(adapter(name, weights=float(version)), name))[0] == 200
            if version > 1:
                await bench.post("/v1/unload_lora_adapter", {"lora_name": f"trl-policy-v{version - 1}"})
        await eventually(
            lambda: all(sorted(p.name for p in f.iterdir()) == ["trl-policy-v2", "trl-policy-v3"] for f in folders)
        )
        await replicas[1].stop()
        await eventually(lambda: not bench.proxy.registry.serves(1))
        shutil.rmtree(folders[1])
        folders[1].mkdir()
        await replicas[1].restart()
        await bench.in_service()
        assert list(replicas[1].engine.adapters) == ["trl-policy-v3"]
        assert [path.name for path in folders[1].iterdir()] == ["trl-policy-v3"]


async def test_a_load_that_cannot_be_pushed_is_taken_back(
    replicas: Replicas, adapter: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushing(replicas, tmp_path, monkeypatch) as (bench, folders):
        status, answer = await bench.load(str(tmp_path / "nowhere"))
        assert status == 502
        assert "nowhere: cannot read the adapter" in answer["error"]["message"]
        folders[1].rmdir()
        folders[1].touch()  # a disk that takes nothing
        status, answer = await bench.load(adapter(POLICY))
        assert status == 502
        assert "replica 1: push: " in answer["error"]["message"]
        await eventually(lambda: not any(replica.engine.adapters for replica in replicas))


async def test_a_path_that_cannot_be_one_stops_nothing(
    replicas: Replicas, adapter: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushing(replicas, tmp_path, monkeypatch) as (bench, _):
        status, answer = await bench.load("/with\0in it")
        assert status == 502
        assert "not a path" in answer["error"]["message"]
        assert (await bench.load(adapter(POLICY)))[0] == 200


async def test_tokens_are_shown_to_nobody(
    replicas: Replicas,
    adapter: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever goes wrong and whoever asks: none of the three tokens is in a log, an answer, a repr or a counter."""
    tokens = {"UP": "t0ken-of-the-replicas", "IN": "t0ken-of-the-clients", "RECEIVERS": TOKEN}
    for name, token in tokens.items():
        monkeypatch.setenv(name, token)
    caplog.set_level(logging.DEBUG)
    said: list[object] = []
    async with (
        EmulatedReplica(api_key=tokens["UP"]) as replica,
        serve_receiver(Receiver(AdapterStore(tmp_path / "received"), Bearer(TOKEN))) as receiver,
        proxied(
            [replica],
            transport=TransportSection(kind="push", retry_s=0.01),
            receivers=[receiver.url],
            receiver_token_env="RECEIVERS",
            token_env="UP",
            incoming_token_env="IN",
        ) as bench,
    ):
        with_token = {"Authorization": f"Bearer {tokens['IN']}"}
        for headers in (with_token, {}, {"Authorization": "Bearer wrong"}):
            bench.session.headers.clear()
            bench.session.headers.update(headers)
            said += [await bench.complete(), await bench.complete("nobody"), await bench.load("/nowhere")]
            said += [await bench.load(adapter(POLICY)), await bench.complete(POLICY)]
            said += [await bench.get(path) for path in ("/metrics", "/proxy/stats", "/health", "/v1/models", "/x")]
            if headers is with_token:
                assert [answer[0] for answer in said] == [200, 404, 502, 200, 200, 200, 200, 200, 200, 404]  # type: ignore[index]
                assert replica.requests[-1][2]["Authorization"] == f"Bearer {tokens['UP']}"
            else:
                assert [answer[0] for answer in said] == [401] * 7 + [200] + [401] * 2  # type: ignore[index]
            kept, said = said, []
            assert not any(token in json.dumps(kept) for token in tokens.values())
        bench.session.headers.update(with_token)
        await replica.stop()
        said += [await bench.complete() for _ in range(5)]
        said += [repr(vars(one)) for one in (bench.proxy, receiver)]
        said += [repr(bench.proxy._config), bench.proxy.stats()]
    text = f"{said} {caplog.text} {[vars(record) for record in caplog.records]}"
    assert "replica 0 is out of service" in text
    assert not any(token in text for token in tokens.values())
