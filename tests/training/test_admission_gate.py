"""The gate for coroutines and the task that moves its cap: nobody is ever left standing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from rlkit.admission.asked import AskedLimit
from rlkit.admission.gauges import gauges
from rlkit.admission.law import Decision, FixedCap, Reading, decide
from rlkit.training.admission_gate import AsyncGate, control

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 7.0
"""


class Visits:
    """Coroutines that pass the gate and stay inside until they are told to leave."""

    def __init__(self, gate: AsyncGate) -> None:
        self.gate, self.inside = gate, list[int]()
        self._leave: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def arrive(self, *numbers: int) -> None:
        for number in numbers:
            self._leave[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._visit(number))
        await settled()

    async def leave(self, number: int) -> None:
        self._leave[number].set()
        await self.tasks[number]
        await settled()

    async def cancel(self, number: int) -> None:
        self.tasks[number].cancel()
        await asyncio.gather(self.tasks[number], return_exceptions=True)
        await settled()

    async def _visit(self, number: int) -> None:
        async with self.gate.admission():
            self.inside.append(number)
            try:
                await self._leave[number].wait()
            finally:
                self.inside.remove(number)


async def settled() -> None:
    """Let every coroutine run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_whoever_came_first_goes_first() -> None:
    visits = Visits(AsyncGate(2))
    await visits.arrive(1, 2, 3, 4)
    assert visits.inside == [1, 2]
    await visits.leave(1)
    assert visits.inside == [2, 3]
    visits.gate.set_cap(5)
    await settled()
    assert visits.inside == [2, 3, 4]
    assert (visits.gate.in_flight, visits.gate.held, visits.gate.completed) == (3, 0, 1)
    visits.gate.open()
    for number in (2, 3, 4):
        await visits.leave(number)


async def test_a_place_is_given_back_however_a_visit_ends() -> None:
    visits = Visits(AsyncGate(1))
    await visits.arrive(1, 2, 3)
    await visits.cancel(2)  # in the line
    assert visits.gate.held == 1
    await visits.cancel(1)  # inside
    assert visits.inside == [3]
    await visits.leave(3)
    with pytest.raises(ZeroDivisionError):
        async with visits.gate.admission():
            raise ZeroDivisionError
    assert (visits.gate.in_flight, visits.gate.held) == (0, 0)


async def test_one_that_is_cancelled_as_its_turn_comes_gives_the_turn_on() -> None:
    visits = Visits(AsyncGate(1))
    await visits.arrive(1, 2, 3)
    visits._leave[1].set()
    await visits.tasks[1]  # the turn is given to 2, which has not run since
    visits.tasks[2].cancel()
    await settled()
    assert visits.inside == [3]
    await visits.leave(3)
    assert visits.gate.in_flight == 0


async def test_an_open_gate_holds_nobody() -> None:
    visits = Visits(AsyncGate(1))
    await visits.arrive(1, 2)
    visits.gate.open()
    await visits.arrive(3)
    assert visits.inside == [1, 2, 3]
    for number in (1, 2, 3):
        await visits.leave(number)


class Scripted:
    """A law that answers with these caps, one a reading; an exception is raised."""

    def __init__(self, caps: Iterable[int | Exception], then: Callable[[], None]) -> None:
        self.poll_s, self.cap, self.readings = 0.0, 1, list[Reading]()
        self._caps, self._then = list(caps), then

    def observe(self, reading: Reading) -> Decision:
        self.readings.append(reading)
        cap = self._caps.pop(0)
        if isinstance(cap, Exception):
            raise cap
        self.cap = cap
        if not self._caps:
            self._then()
        return decide(reading, cap, "grown", f"to {cap}")


class Book:
    """These pages, then the same one again and again; one that is `torn` cannot be opened."""

    def __init__(self, pages: Iterable[str | None], torn: bool = False) -> None:
        self._pages, self._torn = list(pages), torn

    async def __aenter__(self) -> None:
        if self._torn:
            raise OSError("no session")

    async def __aexit__(self, *_: object) -> None:
        return None

    async def page(self) -> str | None:
        return self._pages.pop(0) if self._pages else PAGE


async def controlled(
    caps: Iterable[int | Exception],
    gate: AsyncGate,
    trace: Path,
    pages: Iterable[str | None] = (),
    torn: bool = False,
    asked: AskedLimit | None = None,
) -> tuple[Scripted, list[Mapping[str, float]]]:
    stop, published = asyncio.Event(), list[Mapping[str, float]]()
    law = Scripted(caps, stop.set)
    await control(law, gate, Book(pages, torn), published.append, trace, stop, asked)
    return law, published


async def test_a_limit_that_a_person_asks_for_lowers_the_cap_and_is_traced(tmp_path: Path) -> None:
    gate, trace, control_file = AsyncGate(1), tmp_path / "cap.jsonl", tmp_path / "control.json"
    control_file.write_text('{"max_inflight": 2}')
    _, published = await controlled([5, 1], gate, trace, asked=AskedLimit(control_file))
    assert [page["rollout/inflight_cap"] for page in published] == [2.0, 1.0]
    first, second = (json.loads(line) for line in trace.read_text().splitlines())
    assert (first["reason"], first["text"]) == ("asked", "2 may be in flight, as asked; the law would allow 5.")
    assert second["reason"] != "asked"  # the law itself allows less


async def test_readings_become_caps_metrics_and_a_trace(tmp_path: Path) -> None:
    gate, trace = AsyncGate(1), tmp_path / "cap.jsonl"
    visits = Visits(gate)
    await visits.arrive(1, 2, 3)
    law, published = await controlled([2, 1], gate, trace, [PAGE, PAGE.replace(" 7.0", " 9.0")])
    first, second = law.readings
    assert (first.in_flight, first.held, second.in_flight, second.held) == (1, 2, 2, 1)
    state = second.replicas["0"]
    assert state is not None
    assert (state.usage, state.running, state.waiting, state.preemptions) == (0.5, 3, 2, 2)
    assert published[0] == {
        "rollout/inflight_cap": 2.0,
        "rollout/inflight_admitted": 1.0,
        "rollout/gate_held": 2.0,
        "rollout/kv_cache_usage": 0.5,
        "rollout/vllm_running_requests": 3.0,
        "rollout/vllm_queued_requests": 2.0,
    }  # how many preemptions there were before the first reading is nobody's business
    assert published[1]["rollout/vllm_preemptions_total"] == 2.0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(line["cap"], line["reason"], line["text"], line["in_flight"]) for line in lines] == [
        (2, "grown", "to 2", 1),
        (1, "grown", "to 1", 2),
    ]
    # It was told to stop: the gate is open.
    await settled()
    assert visits.inside == [1, 2, 3]
    for number in (1, 2, 3):
        await visits.leave(number)


async def test_what_has_ended_since_the_last_reading_is_counted_once(tmp_path: Path) -> None:
    gate = AsyncGate(4)
    for _ in range(3):
        async with gate.admission():
            pass
    law, _ = await controlled([4, 4], gate, tmp_path / "cap.jsonl")
    assert [reading.completed for reading in law.readings] == [3, 0]


@pytest.mark.parametrize(("torn", "cause"), [(False, "no law"), (True, "no session")])
async def test_an_error_of_the_cap_opens_the_gate_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: bool, cause: str
) -> None:
    visits = Visits(AsyncGate(1))
    await visits.arrive(1, 2)
    with caplog.at_level(logging.WARNING):
        await controlled([1, ZeroDivisionError("no law")], visits.gate, tmp_path / "cap.jsonl", torn=torn)
    assert "nothing is held back" in caplog.text
    assert cause in caplog.text
    await settled()
    assert visits.inside == [1, 2]
    for number in (1, 2):
        await visits.leave(number)


async def test_pages_that_cannot_be_read_are_no_error(tmp_path: Path) -> None:
    law, published = await controlled([1, 1, 1], AsyncGate(1), tmp_path / "cap.jsonl", [None, "<html>", PAGE])
    assert [reading.readable.keys() for reading in law.readings] == [set(), set(), {"0"}]
    assert "rollout/kv_cache_usage" not in published[0]


async def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    law, published = await controlled([1, 2], AsyncGate(1), tmp_path / "nowhere" / "cap.jsonl")
    assert len(law.readings) == len(published) == 2


def test_unknown_is_left_out_of_the_metrics() -> None:
    decision = FixedCap(8).observe(Reading(0.0, {"0": None}, 3, 0, 0))
    assert gauges(decision) == {
        "rollout/inflight_cap": 8.0, "rollout/inflight_admitted": 3.0, "rollout/gate_held": 0.0
    }  # fmt: skip
