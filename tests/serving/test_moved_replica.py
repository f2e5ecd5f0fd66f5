"""A replica that is started anew at another address, while the proxy serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from proxy_bench import POLICY, eventually, proxied

from rlkit.errors import BadInput
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.moved_replica import Move, parse_move

Write = Callable[..., str]


async def test_it_gets_the_live_adapters_before_requests(replicas: list[EmulatedReplica], adapter: Write) -> None:
    async with proxied(replicas) as bench, EmulatedReplica() as anew:
        assert (await bench.load(adapter("v1")))[0] == HTTPStatus.OK
        answer = await bench.post("/proxy/replicas", {"replica": 1, "url": anew.url + "/"})
        assert answer == (HTTPStatus.OK, f"replica 1 is at {anew.url}")
        assert not bench.proxy.registry.serves(1)
        await bench.in_service(1)
        assert POLICY in anew.engine.adapters
        answers = await asyncio.gather(*(bench.complete(POLICY, [number] * 40) for number in range(8)))
        assert [status for status, _ in answers] == [HTTPStatus.OK] * 8
        outcomes = bench.proxy.stats()["per_replica"][1]
        assert (outcomes["url"], outcomes["completed"] > 0) == (anew.url, True)


async def test_what_waits_at_the_old_address_is_asked_again_elsewhere(replicas: list[EmulatedReplica]) -> None:
    async with proxied(replicas) as bench, EmulatedReplica() as anew:
        for replica in replicas:
            replica.faults.token_delay_s = 30.0
        waiting = asyncio.create_task(bench.complete())
        await eventually(lambda: any(replica.in_flight for replica in replicas))
        held = next(number for number, replica in enumerate(replicas) if replica.in_flight)
        replicas[1 - held].faults.token_delay_s = 0.0
        await bench.post("/proxy/replicas", {"replica": held, "url": anew.url})
        status, _ = await waiting
        assert status == HTTPStatus.OK


async def test_the_same_address_again_changes_nothing(replicas: list[EmulatedReplica]) -> None:
    async with proxied(replicas) as bench:
        assert (await bench.post("/proxy/replicas", {"replica": 0, "url": replicas[0].url}))[0] == HTTPStatus.OK
        assert bench.proxy.registry.serves(0)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"url": "http://a"}, "replica"),
        ({"replica": -1, "url": "http://a"}, "replica"),
        ({"replica": 2, "url": "http://a"}, "replica: 2 of 2"),
        ({"replica": 0, "url": "ftp://a"}, "url"),
        ({"replica": 0, "url": "http://user:secret@a"}, "url"),
        ({"replica": 0, "url": "http://a", "receiver": "b"}, "receiver"),
        ({"replica": 0, "url": "http://a", "more": 1}, "more"),
    ],
)
async def test_what_does_not_fit_is_refused(replicas: list[EmulatedReplica], fields: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        parse_move(fields, 2, needs_receiver=False)
    async with proxied(replicas) as bench:
        status, answer = await bench.post("/proxy/replicas", fields)
        assert status == HTTPStatus.BAD_REQUEST
        assert word in answer["error"]["message"]


def test_pushed_adapters_need_a_receiver() -> None:
    with pytest.raises(BadInput, match="receiver"):
        parse_move({"replica": 0, "url": "http://a"}, 1, needs_receiver=True)
    move = parse_move({"replica": 0, "url": "http://a/", "receiver": "http://b/"}, 1, needs_receiver=True)
    assert move == Move(replica=0, url="http://a", receiver="http://b")
