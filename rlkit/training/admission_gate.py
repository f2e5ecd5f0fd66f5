"""The admission gate as coroutines meet it, and the task that moves its cap by what the servers say.

The decisions are made elsewhere: `rlkit.admission.gate` says who may pass, a law of `rlkit.admission` how many. Here
are the futures, the clock, the polling and the trace. No rollout is ever left standing at the gate because of an error
in here: the gate then opens for good, and the run goes on as if there were no cap.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlkit.admission.asked import AskedLimit
from rlkit.admission.gate import Gate
from rlkit.admission.gauges import gauges
from rlkit.admission.law import Decision, Law, Policy, Reading, at_most
from rlkit.admission.readings import PageReader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admission:
    """What the rollout process must know to admit rollouts: it is pickled into it.

    `max_model_len` is in tokens; `trace` is the file that gets one JSON line a decision, `asked` the one in which a
    person sets a limit.
    """

    policy: Policy
    max_model_len: int
    trace: Path
    asked: Path


class AsyncGate:
    """`Gate` for coroutines: `async with gate.admission():` waits for its turn and gives its place back at the end."""

    def __init__(self, cap: int) -> None:
        self._gate: Gate[int] = Gate(cap)
        self._line: dict[int, asyncio.Future[None]] = {}
        self._next = 0

    @property
    def cap(self) -> int:
        """How many may be inside."""
        return self._gate.cap

    @property
    def is_open(self) -> bool:
        """Whether everybody passes."""
        return self._gate.is_open

    @property
    def in_flight(self) -> int:
        """How many are inside."""
        return self._gate.in_flight

    @property
    def held(self) -> int:
        """How many wait."""
        return self._gate.held

    @property
    def completed(self) -> int:
        """How many have been inside and left, since the beginning."""
        return self._gate.completed

    @contextlib.asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """One place inside, from its turn on until the context ends (however it ends)."""
        ticket, self._next = self._next, self._next + 1
        turn = self._line[ticket] = asyncio.get_running_loop().create_future()
        self._let_in(self._gate.arrive(ticket))
        try:
            await turn
            yield
        finally:
            self._line.pop(ticket, None)
            self._let_in(self._gate.leave(ticket))

    def set_cap(self, cap: int) -> None:
        """Change the cap (at least 1)."""
        self._let_in(self._gate.set_cap(cap))

    def open(self) -> None:
        """Let everybody pass from now on, for good."""
        self._let_in(self._gate.open())

    def _let_in(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            turn = self._line.pop(ticket)
            if not turn.done():  # cancelled while it waited: it is about to leave
                turn.set_result(None)


class Pages(AbstractAsyncContextManager[Any], Protocol):
    """Where the servers' `/metrics` page comes from (`rlkit.admission.poll.MetricsPoll`)."""

    async def page(self) -> str | None:
        """The page now, or None; raises nothing."""


async def control(
    law: Law,
    gate: AsyncGate,
    pages: Pages,
    publish: Callable[[Mapping[str, float]], None],
    trace: Path,
    stop: asyncio.Event,
    asked: AskedLimit | None = None,
) -> None:
    """Read, decide and set the cap every `law.poll_s` seconds until `stop`; every decision is published and traced.

    `asked` is the limit that a person may set meanwhile; None: nobody can.

    However it ends, the gate is open afterwards. An error of its own is a warning, not the run's end.
    """
    reader, counted = PageReader(), 0
    try:
        async with pages:
            while not stop.is_set():
                began = time.monotonic()
                replicas = reader.read(await pages.page())
                completed, counted = gate.completed - counted, gate.completed
                decision = law.observe(Reading(began, replicas, gate.in_flight, gate.held, completed))
                decision = at_most(decision, None if asked is None else asked.read())
                gate.set_cap(decision.cap)
                publish(gauges(decision))
                write_line(trace, decision)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), max(0.0, began + law.poll_s - time.monotonic()))
    except Exception:
        log.warning("the admission cap failed; from now on nothing is held back", exc_info=True)
    finally:
        gate.open()


def write_line(trace: Path, decision: Decision) -> None:
    """Append a decision to the trace, with the time of day; a trace that cannot be written costs the trace only."""
    line = {"at": round(time.time(), 3), **decision.to_dict()}
    with contextlib.suppress(OSError), trace.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
