"""The published law on emulated replicas set to the published bed: tests/bench/cap_http.py [--speed N] [--json]

Two replicas of 8 GiB of KV cache each behind the real proxy, 512 rollouts that want in, completions of 5,500 tokens
after the cut at 8,192: the experiment's figures. All goes over HTTP; the replicas' clock runs `--speed` times as fast
as the wall's, and the law reads their /metrics through the proxy as the rollout worker does. On simulated replicas
the same claim is a test (tests/admission/test_beds.py); here the clock is real, so that a busy machine, which answers
late, moves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from rlkit.admission.law import Decision, Reading, make_law
from rlkit.admission.poll import MetricsPoll
from rlkit.admission.readings import PageReader
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.emulated_timing import EmulatedTiming, rates_of
from rlkit.simulation.replica import Capacity
from rlkit.training.admission_gate import AsyncGate

sys.path.append(str(Path(__file__).parents[1]))
from proxy_bench import ProxyBench, proxied

ENGINES = 2
KV_TOKENS = 8 * 2**30 // 28_672  # 8 GiB at the model's bytes a token
CEILING = 512
MAX_MODEL_LEN = 9216
MAX_TOKENS = 8192
# Before the cut at 8,192 tokens, behind which 5,500 are left: published tokens/s x time / completions.
MEAN_TOKENS = 6840.0
PROMPT_TOKENS = 150
GROUP = 8

# Emulated seconds in a real one: the completions of eight seconds are made up within one by half a core.
SPEED = 8.0
# The law begins below what fits and grows by a quarter a turnover of three minutes: four of them, and twice as long.
SETTLED_AFTER_S = 720.0
LASTS_S = 2160.0
# One reading is a moment of a wave; the experiment's figures are those of steps, which take half a minute.
READINGS_A_STEP = 6

WANTED_CAPS = (60, 170)
WANTED_USAGE = (0.35, 0.85)


@asynccontextmanager
async def bed(speed: float) -> AsyncIterator[ProxyBench]:
    """The replicas and a proxy in front of them, in this process."""
    capacity = Capacity(KV_TOKENS)
    timing = partial(EmulatedTiming, rates_of("h200", adapters=False), capacity, speed)
    blocks = KV_TOKENS // capacity.block_size + 1
    engine = partial(EmulatedEngine, num_gpu_blocks=blocks, max_model_len=MAX_MODEL_LEN, mean_tokens=MEAN_TOKENS)
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(EmulatedReplica(engine=engine, timing=timing)) for _ in range(ENGINES)
        ]
        yield await stack.enter_async_context(proxied(replicas))


async def rollouts(bench: ProxyBench, gate: AsyncGate, numbers: itertools.count[int]) -> None:
    """One after the other, each behind the gate, until cancelled."""
    while True:
        async with gate.admission():
            number = next(numbers)
            group = number // GROUP
            prompt = [group % 256, group // 256, *range(PROMPT_TOKENS - 2)]
            body = {"model": "emulated", "prompt": prompt, "max_tokens": MAX_TOKENS, "seed": number}
            async with bench.session.post(f"{bench.proxy.url}/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(f"rollout {number}: {response.status} {text[:200]}")


async def decisions(bench: ProxyBench, gate: AsyncGate, speed: float, lasts_s: float, bar: Progress) -> list[Decision]:
    """What the law decides, a reading every five emulated seconds."""
    law = make_law("published", ceiling=CEILING, max_model_len=MAX_MODEL_LEN)
    made: list[Decision] = []
    reader, counted = PageReader(), 0
    begun = asyncio.get_running_loop().time()
    task = bar.add_task("emulated seconds", total=lasts_s)
    async with MetricsPoll(bench.proxy.url) as poll:
        while not made or made[-1].time < lasts_s:
            replicas = reader.read(await poll.page())
            now = (asyncio.get_running_loop().time() - begun) * speed
            completed, counted = gate.completed - counted, gate.completed
            made.append(law.observe(Reading(now, replicas, gate.in_flight, gate.held, completed)))
            gate.set_cap(law.cap)
            bar.update(task, completed=now)
            until = begun + len(made) * law.poll_s / speed
            await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
    return made


async def measured(first: int, speed: float, lasts_s: float, bar: Progress) -> dict[str, Any]:
    """One run: caps and usage by steps once it has settled. `first` numbers the first rollout, and so the lengths."""
    async with bed(speed) as bench:
        gate, numbers = AsyncGate(1), itertools.count(first)
        clients = [asyncio.create_task(rollouts(bench, gate, numbers)) for _ in range(CEILING)]
        try:
            made = await decisions(bench, gate, speed, lasts_s, bar)
            failed = [error for client in clients if client.done() and (error := client.exception())]
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        if failed:
            raise failed[0]
    settled = [one for one in made if one.time > SETTLED_AFTER_S]
    usages = [one.usage for one in settled if one.usage is not None]
    whole = len(usages) - len(usages) % READINGS_A_STEP
    steps = [statistics.fmean(usages[at : at + READINGS_A_STEP]) for at in range(0, whole, READINGS_A_STEP)]
    caps = [one.cap for one in settled]
    return {
        "first": first,
        "readings": len(settled),
        "cap": [min(caps), round(statistics.fmean(caps)), max(caps)],
        "usage": [round(value, 3) for value in (min(steps), statistics.fmean(steps), max(steps))],
        "preemptions": sum(one.preemptions or 0 for one in settled),
        "completions": gate.completed,
    }


def met(run: dict[str, Any]) -> bool:
    """Whether caps and usage stayed where they were published to."""
    return bool(
        WANTED_CAPS[0] <= run["cap"][0] <= run["cap"][2] <= WANTED_CAPS[1]
        and WANTED_USAGE[0] <= run["usage"][0] <= run["usage"][2] <= WANTED_USAGE[1]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; exit code 1 when a run left the wanted range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", type=float, default=SPEED)
    parser.add_argument("--seconds", type=float, default=LASTS_S, help="emulated seconds a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.seconds <= SETTLED_AFTER_S:
        parser.error(f"--seconds {options.seconds:g}: the law needs {SETTLED_AFTER_S:g} to settle")
    console = Console(stderr=True)
    with Progress(console=console) as bar:
        runs = [
            asyncio.run(measured(10_000 * one, options.speed, options.seconds, bar)) for one in range(options.rounds)
        ]
    for run in runs:
        if not options.json:
            print(
                f"cap {run['cap'][0]} to {run['cap'][2]}, mean {run['cap'][1]}; usage by steps {run['usage'][0]} to "
                f"{run['usage'][2]}, mean {run['usage'][1]}; {run['preemptions']} preemptions, "
                f"{run['completions']} completions; wanted {WANTED_CAPS} and {WANTED_USAGE}: {met(run)}"
            )
    if options.json:
        print(json.dumps({"speed": options.speed, "runs": runs, "met": all(map(met, runs))}))
    return 0 if all(map(met, runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
