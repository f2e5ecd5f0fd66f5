"""The published law on emulated replicas that are set to the published bed, over HTTP and in (quick) real time.

Two engines of 8 GiB of KV cache each, 512 rollouts that want in, completions of 5,500 tokens: the experiment's figures.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from proxy_bench import ProxyBench, proxied

from rlkit.admission.law import Decision, Reading, make_law
from rlkit.admission.poll import MetricsPoll
from rlkit.admission.readings import PageReader
from rlkit.serving.emulated import EmulatedReplica
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_timing import EmulatedTiming, rates_of
from rlkit.simulation.replica import Capacity
from rlkit.training.admission_gate import AsyncGate

ENGINES = 2
KV_TOKENS = 8 * 2**30 // 28_672  # 8 GiB at the model's bytes a token
CEILING = 512
MAX_MODEL_LEN = 9216
# Before the cut at 8,192 tokens, behind which 5,500 are left: published tokens/s x time / completions.
MEAN_TOKENS = 6840.0

# Emulated seconds in a real one: as many as two busy cores can make up the completions for.
SPEED = 20.0
# The law begins below what fits and grows by a quarter a turnover of three minutes: four of them, and as long again.
SETTLED_AFTER_S = 720.0
LASTS_S = 1500.0
READINGS = 6  # in a step


@asynccontextmanager
async def bed() -> AsyncIterator[ProxyBench]:
    capacity = Capacity(KV_TOKENS)
    timing = partial(EmulatedTiming, rates_of("h200", adapters=False), capacity, SPEED)
    blocks = KV_TOKENS // capacity.block_size + 1
    engine = partial(EmulatedEngine, num_gpu_blocks=blocks, max_model_len=MAX_MODEL_LEN, mean_tokens=MEAN_TOKENS)
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(EmulatedReplica(engine=engine, timing=timing)) for _ in range(ENGINES)
        ]
        yield await stack.enter_async_context(proxied(replicas))


async def ask(bench: ProxyBench, gate: AsyncGate, numbers: itertools.count[int]) -> None:
    while True:
        async with gate.admission():
            number = next(numbers)
            prompt = [number // 8 % 256, number // 2048 % 256, *range(148)]
            body = {"model": "emulated", "prompt": prompt, "max_tokens": MAX_MODEL_LEN - 1024, "seed": number}
            async with bench.session.post(f"{bench.proxy.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()


async def decisions(bench: ProxyBench, gate: AsyncGate) -> list[Decision]:
    law = make_law("published", ceiling=CEILING, max_model_len=MAX_MODEL_LEN)
    made: list[Decision] = []
    reader, counted = PageReader(), 0
    begun = asyncio.get_running_loop().time()
    async with MetricsPoll(bench.proxy.url) as poll:
        while not made or made[-1].time < LASTS_S:
            replicas = reader.read(await poll.page())
            now = (asyncio.get_running_loop().time() - begun) * SPEED
            completed, counted = gate.completed - counted, gate.completed
            made.append(law.observe(Reading(now, replicas, gate.in_flight, gate.held, completed)))
            gate.set_cap(law.cap)
            await asyncio.sleep(law.poll_s / SPEED)
    return made


@pytest.mark.slow
async def test_the_published_law_settles_where_the_published_run_did() -> None:
    async with bed() as bench:
        gate, numbers = AsyncGate(1), itertools.count()
        clients = [asyncio.create_task(ask(bench, gate, numbers)) for _ in range(CEILING)]
        made = await decisions(bench, gate)
        failed = [client.exception() for client in clients if client.done()]
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert failed == []
    settled = [decision for decision in made if decision.time > SETTLED_AFTER_S]
    told = [(round(one.time), one.cap, one.usage, one.preemptions, one.reason) for one in made]
    assert made[0].cap == ENGINES * KV_TOKENS // MAX_MODEL_LEN
    assert min(one.cap for one in settled) >= 60, told
    assert max(one.cap for one in settled) <= 170, told
    # One reading is a moment of a wave; the experiment's figures are those of steps, which take half a minute.
    usages = [one.usage for one in settled if one.usage is not None]
    means = [statistics.fmean(usages[begin : begin + READINGS]) for begin in range(0, len(usages) - READINGS, READINGS)]
    assert len(means) > 20
    assert min(means) >= 0.35, told
    assert max(means) <= 0.85, told
