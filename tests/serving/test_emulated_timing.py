"""An emulated replica that takes its time and fills its KV cache."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
from proxy_bench import PATIENCE_S, eventually

from rlkit.errors import BadInput
from rlkit.serving.emulated_engine import Adapter, EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.emulated_timing import EmulatedTiming, rates_of
from rlkit.serving.vllm_metrics import ReplicaReading, read_page
from rlkit.simulation.replica import Capacity

ADAPTER = Adapter("trl-policy-v1", "/lora/trl-policy-v1", 7)
# Ten times 96 prompt and 64 completion tokens, in blocks of 16.
SMALL = Capacity(kv_tokens=1600, block_size=16)


def prompt(number: int) -> list[int]:
    return [number, *range(95)]


@pytest.fixture
async def timing() -> AsyncIterator[EmulatedTiming]:
    """An hour in a blink, once it is resumed: everything that was asked for begins at the same moment then."""
    timing = EmulatedTiming(rates_of("h200"), SMALL, speed=1000.0)
    timing.pause(clear_cache=False)
    yield timing
    timing.close()


@pytest.fixture
async def slow() -> AsyncIterator[EmulatedTiming]:
    """Nothing ends."""
    timing = EmulatedTiming(rates_of("h200"), SMALL, speed=1e-6)
    yield timing
    timing.close()


async def test_the_shorter_ends_first_and_leaves_nothing_behind(timing: EmulatedTiming) -> None:
    ends: list[int] = []

    async def one(tokens: int) -> None:
        await timing.generate(ADAPTER, prompt(tokens), tokens)
        ends.append(tokens)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for tokens in (60, 20, 40):
            group.create_task(one(tokens))
        await asyncio.sleep(0)
        timing.resume()
    replica = timing.bring_up_to_date()
    assert ends == [20, 40, 60]
    assert (replica.running, len(replica.waiting), replica.finished, replica.preemptions) == (0, 0, 3, 0)
    assert replica.usage == pytest.approx(0, abs=1e-9)


async def test_more_than_the_cache_holds_waits_and_is_preempted(timing: EmulatedTiming) -> None:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(timing.generate(ADAPTER, prompt(number), 64))
        await asyncio.sleep(0)
        assert len(timing.replica.waiting) == 64
        timing.resume()
        assert 10 < timing.replica.running < 20
        assert timing.replica.usage > 0.9
    assert timing.replica.finished == 64
    assert timing.replica.preemptions > 0


async def test_a_client_that_goes_away_frees_its_blocks_wherever_its_request_is(slow: EmulatedTiming) -> None:
    tasks = [asyncio.create_task(slow.generate(ADAPTER, prompt(number), 1_000_000)) for number in range(64)]
    await asyncio.sleep(0)
    slow.pause(clear_cache=False)
    assert slow.replica.running > 0
    assert slow.replica.waiting
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    replica = slow.bring_up_to_date()
    assert (replica.running, len(replica.waiting), replica.next_at) == (0, 0, math.inf)
    assert replica.usage == pytest.approx(0, abs=1e-9)


async def test_rollouts_of_one_prompt_share_its_blocks_under_one_adapter(slow: EmulatedTiming) -> None:
    other = Adapter("trl-policy-v2", "/lora/trl-policy-v2", 8)
    tasks = [asyncio.create_task(slow.generate(ADAPTER, prompt(0), 1_000_000)) for _ in range(2)]
    await asyncio.sleep(0)
    shared = slow.replica.usage
    tasks.append(asyncio.create_task(slow.generate(other, prompt(0), 1_000_000)))
    await asyncio.sleep(0)
    # 96 tokens are six blocks of a hundred: once for both, once more for the other adapter.
    assert shared == pytest.approx(0.07, abs=0.004)
    assert slow.replica.usage == pytest.approx(0.135, abs=0.008)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def replica() -> AsyncIterator[EmulatedReplica]:
    """A small cache, and completions that do not end by themselves."""
    timing = partial(EmulatedTiming, rates_of("h200"), SMALL, 1e-6)
    engine = partial(EmulatedEngine, num_gpu_blocks=101, mean_tokens=60.0)
    async with EmulatedReplica(engine=engine, timing=timing) as replica:
        yield replica


async def reading(replica: EmulatedReplica, http: aiohttp.ClientSession) -> ReplicaReading:
    async with http.get(f"{replica.url}/metrics") as response:
        return read_page(await response.text())


async def test_the_page_says_what_runs_waits_and_was_preempted(
    replica: EmulatedReplica, http: aiohttp.ClientSession
) -> None:
    async def complete(number: int) -> None:
        body = {"model": "emulated", "prompt": prompt(number), "max_tokens": 64, "n": 2}
        async with http.post(f"{replica.url}/v1/completions", json=body) as response:
            await response.read()

    tasks = [asyncio.create_task(complete(number)) for number in range(20)]
    await eventually(lambda: replica.in_flight == 20)
    before = await reading(replica, http)
    assert before.capacity_tokens == 1600
    assert before.running is not None
    assert before.waiting is not None
    assert before.kv_usage is not None
    assert before.running + before.waiting == 40
    assert 10 < before.running < 40
    assert before.kv_usage > 0.8
    assert before.preemptions_total == 0

    async with http.post(f"{replica.url}/pause?mode=keep") as response:
        assert response.status == 200
    cleared = await reading(replica, http)
    assert (cleared.running, cleared.waiting, cleared.kv_usage) == (0, 40, 0)
    assert cleared.preemptions_total == before.running
    async with http.post(f"{replica.url}/resume") as response:
        assert response.status == 200
    assert (await reading(replica, http)).running == before.running

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: replica.in_flight == 0)
    after = await reading(replica, http)
    assert (after.running, after.waiting) == (0, 0)
    assert after.kv_usage == pytest.approx(0, abs=1e-9)


async def test_a_kept_cache_preempts_nobody(replica: EmulatedReplica, http: aiohttp.ClientSession) -> None:
    body = {"model": "emulated", "prompt": prompt(0), "max_tokens": 64}
    task = asyncio.create_task(http.post(f"{replica.url}/v1/completions", json=body).__aenter__())
    await eventually(lambda: replica.in_flight == 1)
    for path in ("/pause?mode=keep&clear_cache=false", "/resume"):
        async with http.post(replica.url + path) as response:
            assert response.status == 200
    now = await reading(replica, http)
    assert (now.running, now.preemptions_total) == (1, 0)
    task.cancel()


def test_lengths_follow_the_mean_that_was_set() -> None:
    engine = EmulatedEngine(mean_tokens=100.0)
    lengths = [len(engine.sample("emulated", [1, 2, 3], 1000, seed).token_ids) for seed in range(400)]
    assert 90 < sum(lengths) / len(lengths) < 110
    assert max(len(engine.sample("emulated", [1], 50, seed).token_ids) for seed in range(50)) == 50


def test_a_gpu_without_a_data_sheet() -> None:
    with pytest.raises(BadInput, match="gpu: 'abacus' has no data sheet here"):
        rates_of("abacus")
