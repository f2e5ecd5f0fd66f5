"""TRL's own rollout loop with the gate in it, against an emulated replica."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from rlkit.admission.gauges import percentiles
from rlkit.admission.law import Policy
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.training import worker
from rlkit.training.admission_gate import Admission
from rlkit.training.rewards import toy_sum
from rlkit.training.toy_model import build_tokenizer
from rlkit.training.toy_task import Problem
from rlkit.training.worker import RolloutLoop, teach

LIMIT, GROUP, MAX_MODEL_LEN = 8, 4, 160
# Two sequences of 160 tokens fit into 20 blocks of 16; one more is the null block.
SMALL_CACHE = functools.partial(EmulatedEngine, num_gpu_blocks=21)


@pytest.fixture(scope="module", autouse=True)
def accelerate_state() -> Iterator[None]:
    """TRL's child makes it before the loop: accelerate's loggers ask for it."""
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture
async def replica() -> AsyncIterator[EmulatedReplica]:
    async with EmulatedReplica(engine=SMALL_CACHE) as replica:
        yield replica


@pytest.fixture
def start(replica: EmulatedReplica, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Callable[..., Any]:
    """`async with start(policy)` runs a loop until the end of the block, where it is stopped."""

    @contextlib.asynccontextmanager
    async def running(policy: Policy, **arguments: Any) -> AsyncIterator[RolloutLoop]:
        problems = [Problem(a, 10) for a in range(10, 90)]
        loop = RolloutLoop(
            admission=Admission(policy, MAX_MODEL_LEN, tmp_path / "cap.jsonl", tmp_path / "control.json"),
            model_name="emulated",
            dataset=Dataset.from_list([{"prompt": p.prompt(), "answer": p.answer} for p in problems]),
            reward_funcs=[toy_sum],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            rollout_buffer=queue.Queue(),
            model_version_value=SimpleNamespace(value=0),
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(1),
            metrics_queue=queue.Queue(),
            num_generations=GROUP,
            max_inflight_tasks=LIMIT,
            vllm_server_url=replica.url,
            max_tokens=8,
            **arguments,
        )
        loop._loop.close()  # its own, which run() would use; here it runs in the test's
        stop = asyncio.Event()
        loops = asyncio.create_task(loop._run_loops(stop_event=stop))
        try:
            yield loop
        finally:
            stop.set()
            await loops
            loop._tool_pool.shutdown()

    return running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def pause(replica: EmulatedReplica, paused: bool = True) -> None:
    """Let completions stand in the server, or go."""
    if paused:
        replica.state.resumed.clear()
    else:
        replica.state.resumed.set()


async def samples(loop: RolloutLoop, count: int) -> list[Any]:
    await until(lambda: loop.rollout_buffer.qsize() >= count)
    return [loop.rollout_buffer.get_nowait() for _ in range(count)]


async def test_the_server_never_holds_more_than_the_cap(replica: EmulatedReplica, start: Any) -> None:
    most = 0
    async with start("published") as loop:
        pause(replica)
        await until(lambda: loop._gate.in_flight == 2 == replica.in_flight)
        assert loop._gate.held == LIMIT - 2
        pause(replica, False)
        await until(lambda: loop._gate.completed >= 3 * LIMIT)
        most = max(most, loop._gate.in_flight)
        await samples(loop, GROUP)
    assert most <= 2
    lines = (loop._admission.trace).read_text().splitlines()
    assert '"reason": "sized"' in lines[0]


async def test_a_group_has_the_oldest_version_at_which_one_of_it_was_admitted(
    replica: EmulatedReplica, start: Any
) -> None:
    pause(replica)
    async with start("published") as loop:
        await until(lambda: replica.in_flight == 2)
        # All eight were created under version 0, two were admitted under it.
        loop._model_version_value.value = 3
        pause(replica, False)
        first, second = (await samples(loop, 2 * GROUP))[::GROUP]
        assert (first.group_id, first.model_version) == (0, 0)
        assert (second.group_id, second.model_version) == (1, 3)
        await until(lambda: not {0, 1} & loop._oldest_version.keys())


async def test_without_a_law_everything_is_as_trl_has_it(replica: EmulatedReplica, start: Any) -> None:
    pause(replica)
    async with start("none") as loop:
        await until(lambda: replica.in_flight == LIMIT)
        assert loop._gate.held == 0
        loop._model_version_value.value = 3
        pause(replica, False)
        assert {sample.model_version for sample in await samples(loop, 2 * GROUP)} == {0}
        assert loop._oldest_version == {}
        metrics = drained(loop)
    assert metrics["rollout/inflight_cap"] == [float(LIMIT)]
    assert metrics["rollout/kv_cache_usage"] == [0.0]


async def test_waiting_is_told_apart_from_generating(replica: EmulatedReplica, start: Any) -> None:
    replica.faults.token_delay_s = 0.002
    async with start("published") as loop:
        await samples(loop, 2 * GROUP)
        loop._publish({})
        metrics = drained(loop)
    waited, rollouts = map(sum, zip(*metrics["rollout/gate_wait_s"], strict=True))
    whole, _ = map(sum, zip(*metrics["rollout/duration_with_gate_s"], strict=True))
    assert rollouts == sum(metrics["rollout/completed_total"]) >= 2 * GROUP
    assert 0 < waited < whole
    # TRL times a rollout from its dispatch: what is left is the gate.
    dispatched = sum(metrics["rollout/duration_s"])
    assert waited + dispatched == pytest.approx(whole, rel=0.2)
    assert metrics["rollout/duration_p95_s"][-1] < metrics["rollout/duration_with_gate_p95_s"][-1]


async def test_a_stop_ends_what_waits_at_the_gate_and_in_the_server(
    replica: EmulatedReplica, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STOP_GRACE_S", 0.05)
    pause(replica)
    async with start("published") as loop:
        await until(lambda: replica.in_flight == 2)
    assert loop._gate.is_open
    assert (loop._gate.in_flight, loop._gate.held) == (0, 0)
    await until(lambda: replica.in_flight == 0)


async def test_an_error_of_the_law_lets_the_run_go_on(
    replica: EmulatedReplica, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def observe(reading: Any) -> Any:
            raise ZeroDivisionError

        return SimpleNamespace(cap=1, poll_s=5.0, observe=observe)

    monkeypatch.setattr(worker, "make_law", broken)
    pause(replica)
    with caplog.at_level(logging.WARNING):
        async with start("rlkit"):
            await until(lambda: replica.in_flight == LIMIT)
            pause(replica, False)
    assert "nothing is held back" in caplog.text


async def test_an_error_of_trls_loops_is_raised(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = asyncio.Event()

    async def failing(*_: Any, **__: Any) -> None:
        reached.set()
        raise ZeroDivisionError("a reward")

    async def run_until_it_fails() -> None:
        async with start("published"):
            await asyncio.wait_for(reached.wait(), 30)

    monkeypatch.setattr(async_rollout_worker._AsyncRolloutLoop, "_score_group", failing)
    with pytest.raises(ZeroDivisionError, match="a reward"):
        await run_until_it_fails()


class Abacus:
    """An environment with one tool."""

    def __init__(self) -> None:
        self.added = 0

    def reset(self, **_: Any) -> str:
        self.added = 0
        return " Use the abacus."

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The one.
            b: The other.
        """
        self.added += 1
        return a + b


async def test_a_rollout_of_several_turns_passes_the_gate_once(
    replica: EmulatedReplica, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(tokenizer: Any, ids: Any, prefix: Any, tools: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "8"}
        if "tool_response" not in tokenizer.decode(prefix):
            call = {"name": "add", "arguments": {"a": 3, "b": 5}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    monkeypatch.setattr(async_rollout_worker, "parse_response", parsed)
    async with start("published", environment_factory=Abacus) as loop:
        trained = await samples(loop, 2 * GROUP)
        metrics = drained(loop)
        asked = sum(path == "/v1/completions" for _, path, _ in replica.requests)
        assert asked >= 2 * loop._gate.completed
    assert sum(metrics["tools/add/call_total"]) >= 2 * GROUP
    assert "tools/add/failure_total" not in metrics
    assert all(sample.metrics["tools/call_frequency"] == 1.0 for sample in trained)


def drained(loop: RolloutLoop) -> dict[str, list[Any]]:
    """What the trainer would find in the metric queue, by name."""
    found: dict[str, list[Any]] = {}
    with contextlib.suppress(queue.Empty):
        while True:
            for name, value in loop._metrics_queue.get_nowait().items():
                found.setdefault(name, []).append(value)
    return found


def test_what_the_loop_must_know_travels_to_the_child(tmp_path: Path) -> None:
    rollout_worker = AsyncRolloutWorker(model_name="m", dataset_start_index=7)
    admission = Admission("rlkit", 512, tmp_path / "cap.jsonl", tmp_path / "control.json")
    teach(SimpleNamespace(rollout_worker=rollout_worker), admission)
    # A checkpoint and a resume ask for this class, and for this argument.
    assert isinstance(rollout_worker, AsyncRolloutWorker)
    loop_cls, arguments = pickle.loads(pickle.dumps((rollout_worker._loop_cls, rollout_worker._loop_kwargs)))
    assert loop_cls is RolloutLoop
    assert arguments["admission"] == admission
    assert arguments["dataset_start_index"] == 7


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    found = percentiles([(second, second + 1) for second in range(101)])
    assert found == {"rollout/duration_p95_s": 95.0, "rollout/duration_with_gate_p95_s": 96.0}
