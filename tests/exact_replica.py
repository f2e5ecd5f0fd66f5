"""The reference for the fluid engine: vLLM's V1 scheduler on one engine, iteration by iteration and block by block.

Whole blocks of 16 tokens, a free list in the order of last use, cached blocks found by request and position, the last
running request preempted first, a request admitted only if its whole context fits, and at most `budget` tokens computed
in an iteration. A closed loop: a request that ends is replaced at once. Slow, and kept simple.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlkit.simulation.replica import Rates

BLOCK = 16


@dataclass(frozen=True)
class Measured:
    """Rates over the second part of the time: a second, and seconds from arrival to the end."""

    preemptions_s: float
    tokens_s: float
    latency_s: float
    running: float


@dataclass(eq=False)
class _Request:
    number: int
    arrived: float
    tokens: int  # prompt and what was generated
    end: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class ExactReplica:
    """Serves `in_flight` requests at once whose completions have `lengths`, one after the other."""

    def __init__(
        self, rates: Rates, kv_tokens: float, lengths: Sequence[int], prompt_tokens: int, budget: int = 8192
    ) -> None:
        self._rates, self._lengths, self._prompt, self._budget = rates, lengths, prompt_tokens, budget
        blocks = int(kv_tokens / BLOCK)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._owner: list[tuple[int, int] | None] = [None] * blocks
        self._cached: dict[tuple[int, int], int] = {}
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._made = 0
        self._preempted = 0
        self._now = 0.0

    def run(self, in_flight: int, seconds: float, settled: float) -> Measured:
        """Serve for `seconds`, and measure what comes after `settled`."""
        for _ in range(in_flight):
            self._arrive()
        tokens, running_seconds, latencies, preempted_before = 0, 0.0, [], 0
        while self._now < seconds:
            if self._now <= settled:
                preempted_before = self._preempted
            scheduled = self._schedule()
            batch = sum(count for _, count in scheduled)
            cached = sum(request.computed for request in self._running)
            rates, running = self._rates, len(self._running)
            took = rates.base_s + rates.sequence_s * running + rates.token_s * cached
            took += rates.prefill_token_s * (batch - len(scheduled))
            self._now += took
            settled_now = self._now > settled
            running_seconds += running * took if settled_now else 0.0
            for request, count in scheduled:
                request.computed += count
                if request.computed == request.tokens:
                    request.tokens += 1
                    tokens += settled_now
                    if request.tokens >= request.end:
                        self._end(request)
                        if settled_now:
                            latencies.append(self._now - request.arrived)
                        self._arrive()
        window = self._now - settled
        preemptions = (self._preempted - preempted_before) / window
        return Measured(preemptions, tokens / window, sum(latencies) / len(latencies), running_seconds / window)

    def _arrive(self) -> None:
        number = self._made
        self._made += 1
        self._waiting.append(_Request(number, self._now, self._prompt, self._prompt + self._lengths[number]))

    def _schedule(self) -> list[tuple[_Request, int]]:
        left, preempted, position = self._budget, False, 0
        scheduled: list[tuple[_Request, int]] = []
        while position < len(self._running) and left > 0:
            request = self._running[position]
            count = min(request.tokens - request.computed, left)
            needed = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            while len(self._free) < needed:
                victim = self._running.pop()
                preempted = True
                if scheduled and scheduled[-1][0] is victim:
                    left += scheduled.pop()[1]
                self._preempt(victim)
                if victim is request:
                    break
            if not request.blocks:
                break
            self._allocate(request, needed)
            scheduled.append((request, count))
            left -= count
            position += 1
        while not preempted and self._waiting and left > 0:
            request = self._waiting[0]
            if -(-request.tokens // BLOCK) > len(self._free):
                break
            self._waiting.popleft()
            self._reuse(request)
            count = min(request.tokens - request.computed, left)
            self._allocate(request, -(-(request.computed + count) // BLOCK) - len(request.blocks))
            self._running.append(request)
            scheduled.append((request, count))
            left -= count
        return scheduled

    def _reuse(self, request: _Request) -> None:
        while len(request.blocks) < (request.tokens - 1) // BLOCK:
            block = self._cached.get((request.number, len(request.blocks)))
            if block is None:
                break
            request.blocks.append(block)
        for block in request.blocks:
            del self._free[block]
        request.computed = len(request.blocks) * BLOCK

    def _allocate(self, request: _Request, count: int) -> None:
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            before = self._owner[block]
            if before is not None:
                self._cached.pop(before, None)
            self._owner[block] = (request.number, len(request.blocks))
            request.blocks.append(block)

    def _preempt(self, request: _Request) -> None:
        self._preempted += 1
        for position in range(request.computed // BLOCK):
            self._cached[(request.number, position)] = request.blocks[position]
        self._free.update(OrderedDict.fromkeys(reversed(request.blocks)))
        request.blocks, request.computed = [], 0
        self._waiting.appendleft(request)

    def _end(self, request: _Request) -> None:
        self._running.remove(request)
        self._free.update(OrderedDict.fromkeys(reversed(request.blocks)))
        for block in request.blocks:
            owner = self._owner[block]
            if owner is not None:
                self._cached.pop(owner, None)
            self._owner[block] = None
