"""Everything breaks, all the time: every request has exactly one correct answer or one clean error.

Four emulated replicas are killed and restarted, frozen, slowed, made to answer 500, 503 and garbage, and see the
trainer's files late. A trainer publishes policies as TRL does, crashes, and starts over with old names and new weights.
Clients ask for whatever is live and give up now and then. An answer is correct when its log-probabilities are those of
the weights that its name had at some moment of the request; the emulated engine's depend on every cached block, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import shutil
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from proxy_bench import PATIENCE_S, ProxyBench, eventually, proxied
from safetensors.numpy import save_file

from rlkit.recipe import TransportSection
from rlkit.serving.adapter_store import AdapterStore
from rlkit.serving.bearer import Bearer
from rlkit.serving.emulated_engine import Adapter, EmulatedEngine, Sampled
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.receiver import Receiver, serve_receiver

REPLICAS = 4
CLIENTS = 64
STALENESS = 4
MAX_LORAS = STALENESS + 2 + 1  # what TRL needs, and one for the adapter of another
TOKENS = 4
TOKEN_S = 0.002

# A request that has no end within this is stuck: nothing here takes longer than a second on purpose.
STUCK_S = 60.0

PROMPTS = [[1000 + problem, *range(problem % 7, 40 + 3 * problem)] for problem in range(40)]


class Engine(EmulatedEngine):
    """Notes when it is given more adapters than it has slots for."""

    most = 0

    def load(self, name: str, path: str, **options: Any) -> str:
        text = super().load(name, path, **options)
        Engine.most = max(Engine.most, len(self.adapters))
        return text


class Oracle:
    """What a server with nothing but these weights answers."""

    def __init__(self) -> None:
        self._engine = EmulatedEngine()
        self._known: dict[tuple[int, int, int], Sampled] = {}

    def expect(self, weights: int, problem: int, seed: int) -> Sampled:
        key = (weights, problem, seed)
        if key not in self._known:
            self._engine.prefix_cache.clear()
            self._known[key] = self._engine.sample(Adapter("x", "/x", weights), PROMPTS[problem], TOKENS, seed)
        return self._known[key]


@dataclass
class Meaning:
    """Weights a name had, from when it may have had them until when it may have had them."""

    weights: int
    begin: float
    end: float = float("inf")


@dataclass
class Trainer:
    """Publishes policies as TRL does; crashes; starts over under the old names and paths."""

    bench: ProxyBench
    folder: Path
    dice: random.Random
    meanings: dict[str, list[Meaning]] = field(default_factory=dict)
    version: int = 0
    written: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.dice.uniform(0.02, 0.1))
            if self.dice.random() < 0.1:
                await self.publish("eval")
            elif not await self.sync():
                self.counts["crashes"] += 1
                self.version = 0

    async def sync(self) -> bool:
        """One weight sync; False when the trainer did not survive it."""
        await self.bench.post("/pause?mode=keep")
        if self.dice.random() < 0.05:
            return False
        if not await self.publish(f"trl-policy-v{self.version + 1}"):
            return False
        self.version += 1
        await self.bench.post("/resume")
        stale = self.version - (STALENESS + 1)
        if stale > 0:
            name = f"trl-policy-v{stale}"
            await self.bench.post("/v1/unload_lora_adapter", {"lora_name": name})
            self.end(name)
        return self.dice.random() > 0.05

    async def publish(self, name: str) -> bool:
        path, weights = self.write(name)
        meaning = Meaning(weights, time.monotonic())
        # It may be live before the trainer hears of it, and never is when the load fails.
        self.meanings.setdefault(name, []).append(meaning)
        status, answer = await self.bench.load(str(path), name)
        self.counts[f"load {status}"] += 1
        assert status in (200, 502, 504), answer
        if status == 200:
            for other in self.replaced_by(name):
                self.end(other, but=meaning)
        else:
            self.meanings[name].remove(meaning)
            for other in self.replaced_by(name):
                self.end(other)
        return status == 200

    def replaced_by(self, name: str) -> list[str]:
        """Names that a load of this one took away: itself, and those of a run before."""
        versions = [other for other in self.meanings if other.startswith("trl-")]
        return versions if name == "trl-policy-v1" else [name]

    def end(self, name: str, but: Meaning | None = None) -> None:
        for meaning in self.meanings[name]:
            if meaning is not but:
                meaning.end = min(meaning.end, time.monotonic())

    def write(self, name: str) -> tuple[Path, int]:
        self.written += 1
        path = self.folder / name
        hidden = path.with_name(f".{name}")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (hidden / "adapter_config.json").write_text(json.dumps(config))
        file = hidden / "adapter_model.safetensors"
        save_file({"lora_A": np.full(4, self.written, dtype=np.float32)}, file)
        weights = zlib.crc32(file.read_bytes())
        shutil.rmtree(path, ignore_errors=True)
        hidden.rename(path)
        return path, weights

    def live(self) -> list[str]:
        return [name for name, meanings in self.meanings.items() if any(m.end == float("inf") for m in meanings)]

    def possible(self, name: str, begin: float, end: float) -> list[int]:
        """All weights a name may have had at some moment between the two."""
        return [m.weights for m in self.meanings.get(name, ()) if m.begin <= end and m.end >= begin]


@dataclass
class Clients:
    """Ask until so many requests have been made, and look at every answer."""

    bench: ProxyBench
    trainer: Trainer
    dice: random.Random
    wanted: int
    oracle: Oracle = field(default_factory=Oracle)
    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, until: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(until))

    async def _client(self, until: int) -> None:
        while self.asked < until:
            self.asked += 1
            names = [*self.trainer.live(), "emulated"]
            name = "nobody" if self.dice.random() < 0.01 else self.dice.choice(names[-3:] * 3 + names)
            problem, seed = self.dice.randrange(len(PROMPTS)), self.dice.randrange(4)
            body = {
                "model": name, "prompt": PROMPTS[problem], "max_tokens": TOKENS, "seed": seed,
                "return_token_ids": True, "logprobs": 0, "stream": self.dice.random() < 0.3,
            }  # fmt: skip
            patience = self.dice.uniform(0.001, 0.05) if self.dice.random() < 0.03 else STUCK_S
            begin = time.monotonic()
            try:
                async with asyncio.timeout(patience):
                    outcome = await self._ask(body, problem, begin)
            except TimeoutError:
                outcome = "gave up" if patience < STUCK_S else "stuck"
            self.outcomes[outcome] += 1

    async def _ask(self, body: dict[str, Any], problem: int, begin: float) -> str:
        url = f"{self.bench.proxy.url}/v1/completions"
        try:
            async with self.bench.session.post(url, json=body) as response:
                data = await response.read()
        except aiohttp.ClientPayloadError:
            # An answer of known length is passed on whole or not at all.
            return "broke off" if body["stream"] else "half an answer"
        except aiohttp.ClientError as error:
            return f"no answer: {error!r}"
        if response.status != 200:
            return self._clean_error(response.status, data)
        try:
            choices = _chunks(data) if body["stream"] else json.loads(data)["choices"]
        except (ValueError, LookupError):
            return f"not an answer: {data[:80]!r}"
        found = Sampled(
            [token for choice in choices for token in choice["token_ids"]],
            [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
            choices[-1]["finish_reason"],
        )
        name = str(body["model"])
        weights = [0] if name == "emulated" else self.trainer.possible(name, begin, time.monotonic())
        if any(self.oracle.expect(one, problem, int(body["seed"])) == found for one in weights):
            return "correct"
        self.wrong.append(f"{name} between {begin} and {time.monotonic()}: {self.trainer.meanings.get(name)}")
        return "wrong"

    def _clean_error(self, status: int, data: bytes) -> str:
        if status in (500, 503) and data == b"out of order":
            return str(status)  # the replica's own, where no other could be asked
        message = json.loads(data)["error"]["message"]
        return str(status) if status in (404, 502, 503) and message else f"not an error: {status} {message}"


def _chunks(data: bytes) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    if events[-1] != "[DONE]":
        raise ValueError("a stream that ends before its end")
    return [json.loads(event)["choices"][0] for event in events[:-1]]


class Chaos:
    """Breaks one replica after the other; several may be broken at once."""

    def __init__(self, replicas: list[EmulatedReplica], dice: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._replicas = replicas
        self._dice = dice
        self._busy: set[int] = set()
        self._actions: list[Callable[[EmulatedReplica], AsyncIterator[None]]] = [
            self._kill, self._freeze, self._slow, self._queue_faults, self._lag, self._refuse_loads, self._be_unhealthy,
        ]  # fmt: skip

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._dice.uniform(0.005, 0.03))
                number = self._dice.randrange(len(self._replicas))
                if number not in self._busy:
                    self._busy.add(number)
                    group.create_task(self._break(number))

    async def _break(self, number: int) -> None:
        action = self._dice.choice(self._actions)
        self.counts[action.__name__] += 1
        steps = action(self._replicas[number])
        try:
            await anext(steps)
            await asyncio.sleep(self._dice.uniform(0.02, 0.4))
        finally:
            # Also when the run is over: what was broken is whole again then.
            with contextlib.suppress(StopAsyncIteration):
                await anext(steps)
            self._busy.discard(number)

    async def _kill(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        await replica.stop()
        yield
        await replica.restart()

    async def _freeze(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        replica.freeze()
        yield
        replica.freeze(False)

    async def _slow(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        replica.faults.token_delay_s = 0.02
        yield
        replica.faults.token_delay_s = TOKEN_S

    async def _queue_faults(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        faults = ["die", "die-mid-response", "garbage", (500, "out of order"), (503, "out of order")]
        replica.faults.completions.extend(self._dice.choices(faults, k=self._dice.randrange(1, 6)))  # type: ignore[arg-type]
        yield
        replica.faults.completions.clear()

    async def _lag(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        replica.faults.mount_lag_s = 0.15
        yield
        replica.faults.mount_lag_s = 0.0

    async def _refuse_loads(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        refusals = [
            (503, "not now"),
            (500, '{"error": {"message": "/x doesn\'t contain tensors"}}'),
            (500, "no"),
            "die",
        ]
        replica.faults.loads.append(self._dice.choice(refusals))  # type: ignore[arg-type]
        yield
        replica.faults.loads.clear()

    async def _be_unhealthy(self, replica: EmulatedReplica) -> AsyncIterator[None]:
        replica.faults.unhealthy = True
        yield
        replica.faults.unhealthy = False


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these beside the block, as long as it lasts; an error of theirs is the block's."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def fleet(kind: str, folder: Path) -> AsyncIterator[ProxyBench]:
    """A proxy over four replicas, for one transport or the other."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(EmulatedReplica(engine=lambda: Engine(max_loras=MAX_LORAS)))
            for _ in range(REPLICAS)
        ]
        more: dict[str, Any] = {}
        if kind == "push":
            receivers = [
                await stack.enter_async_context(
                    serve_receiver(Receiver(AdapterStore(folder / f"disk-{number}"), Bearer("token")))
                )
                for number in range(REPLICAS)
            ]
            more = {"receivers": [receiver.url for receiver in receivers], "receiver_token_env": "RECEIVERS"}
        for replica in replicas:
            replica.faults.mount = folder / "trainer"
            replica.faults.token_delay_s = TOKEN_S
        transport = TransportSection(kind=kind, retry_s=0.05, deadline_s=2.0)  # type: ignore[arg-type]
        yield await stack.enter_async_context(
            proxied(replicas, transport=transport, adapter_root=folder, max_loras=MAX_LORAS, **more)
        )


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults last tenths of a second here, not minutes: so does what waits for their end."""
    monkeypatch.setenv("RECEIVERS", "token")
    for name, seconds in (
        ("proxy.READ_TIMEOUT_S", 0.1),
        ("proxy.SILENT_S", 0.3),
        ("proxy.PROBE_TIMEOUT_S", 0.1),
        ("registry.CONTROL_TIMEOUT_S", 0.5),
        ("registry.DRAIN_S", 0.05),
        ("broadcast.CONTROL_TIMEOUT_S", 1.0),
        ("replica_health.FIRST_WAIT_S", 0.02),
        ("replica_health.LONGEST_WAIT_S", 0.1),
    ):
        monkeypatch.setattr(f"rlkit.serving.{name}", seconds)
    Engine.most = 0


def memory() -> tuple[int, int]:
    """The proxy's own objects and its event loop's, and bytes of this process.

    The replicas, the clients' expectations and pytest's log are left out: they remember on purpose.
    """
    gc.collect()
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    theirs = ("rlkit.serving.emulated", "aiohttp.")
    own = ("rlkit.serving.", "uvloop.", "asyncio.", "_asyncio.", "httptools.", "builtins.coroutine")
    count = sum(n for kind, n in kinds.items() if kind.startswith(own) and not kind.startswith(theirs))
    return count, psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("bucket", 10_000),
        ("push", 2_000),
        pytest.param("push", 10_000, marks=pytest.mark.slow),
    ],
)
async def test_every_request_has_one_correct_answer_or_one_clean_error(
    kind: str, requests: int, tmp_path: Path, hasty: None
) -> None:
    async with fleet(kind, tmp_path) as bench:
        replicas = list(bench.replicas)
        trainer = Trainer(bench, tmp_path / "trainer", random.Random(1))
        clients = Clients(bench, trainer, random.Random(2), requests)
        chaos = Chaos(replicas, random.Random(3))
        async with beside(trainer.run(), chaos.run()):
            await clients.run(until=requests // 3)
            objects, rss = memory()
            await clients.run(until=requests)
        states = [(replica.in_flight, replica.is_paused) for replica in replicas]
        told = f"{clients.outcomes} {trainer.counts} {chaos.counts} {states} {bench.proxy.router.in_flight}"

        assert sum(clients.outcomes.values()) == clients.asked, told
        assert clients.wrong == [], told
        clean = {"correct", "404", "500", "502", "503", "broke off", "gave up"}
        assert set(clients.outcomes) <= clean, told
        assert clients.outcomes["correct"] > 0.5 * requests, told
        assert len(chaos.counts) == 7, told
        assert Engine.most <= MAX_LORAS

        await eventually(lambda: bench.proxy.router.in_flight == [0] * REPLICAS)
        assert bench.proxy.registry._requests == {}
        await eventually(lambda: all(replica.in_flight == 0 for replica in replicas))

        # All is well again: the next policy reaches everybody, and everybody holds what is live and nothing else.
        async with asyncio.timeout(PATIENCE_S):
            await bench.in_service()
            trainer.version = 0
            while not await trainer.publish("trl-policy-v1"):
                await bench.in_service()
            await bench.post("/resume")
        quiet = Clients(bench, trainer, random.Random(4), 200)
        await quiet.run(until=200)
        assert set(quiet.outcomes) <= {"correct", "404", "gave up"}, quiet.outcomes
        # Also one whose last restart nobody saw, until it was asked for what it had lost.
        live = bench.proxy.registry.live
        wanted = {name: trainer.meanings[name][-1].weights for name in live}
        for replica in replicas:
            await eventually(
                lambda: {name: one.weights for name, one in replica.engine.adapters.items()} == wanted  # noqa: B023
            )
            assert not replica.is_paused

        objects_now, rss_now = memory()
        assert objects_now < 1.5 * objects, (objects, objects_now)
        assert rss_now < rss + 40e6, (rss, rss_now)
