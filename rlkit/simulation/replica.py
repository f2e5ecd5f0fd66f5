"""One vLLM engine as a fluid: every running sequence decodes at the same rate, and time jumps from event to event.

A decode iteration with N running sequences that hold S tokens takes t = base + N*per_sequence + S*per_token seconds. S
grows by N an iteration, so k iterations take T(k) = stall + k*t + per_token*N*k^2/2; the quadratic is inverted to
advance by a time. Prefill stalls every decode: stall += prefill_token * (context - cached tokens).

* KV blocks in use: the sum of (context/block + 1/2), less the prompt blocks that rollouts of one prompt share. They
  grow by N/block an iteration.
* Admission: first in, first out, the head only, and its whole context must fit. None in an iteration that preempted.
* Preemption, when the blocks run out: the LAST admitted goes back to the head of the line with nothing computed. Its
  blocks stay reusable, oldest first, until others overwrite them, so that young requests are hit often and cheaply.
* Pause: the clock stops. Clearing the cache preempts everybody, and nothing stays cached.

A state machine: the time comes in with every call, `next_at` says when to `fire` it. The simulator runs it on events,
the emulated replica in real time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from rlkit.simulation.prompt_cache import PromptCache

# Iterations, and blocks, by which two things count as the same: rounding of a long run is a thousand times smaller, and
# below a token nothing happens.
SAME = 1e-6


@dataclass(frozen=True)
class Rates:
    """Seconds of a decode iteration, and of a token's prefill."""

    base_s: float
    sequence_s: float
    token_s: float
    prefill_token_s: float


def slower(rates: Rates, factor: float) -> Rates:
    """The same replica, with everything taking `factor` times as long."""
    return Rates(
        rates.base_s * factor, rates.sequence_s * factor, rates.token_s * factor, rates.prefill_token_s * factor
    )


@dataclass(frozen=True)
class Capacity:
    """What an engine can hold: tokens of KV cache, sequences that run at once, tokens in a block."""

    kv_tokens: float
    max_num_seqs: int = 1024
    block_size: int = 16


class Sequence:
    """One request of one sequence. `prompt` names it and its adapter: equal names share their blocks."""

    __slots__ = (
        "completion_tokens",
        "generated",
        "joined_at",
        "kept_behind",
        "kept_blocks",
        "kept_since",
        "prompt",
        "prompt_tokens",
        "stint",
        "tag",
    )

    def __init__(self, prompt: tuple[int, int], prompt_tokens: int, completion_tokens: int, tag: object = None) -> None:
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.tag = tag
        self.generated = 0.0
        self.joined_at = 0.0  # iterations
        self.stint = 0  # changes when it starts or stops running, which outdates what the heaps say
        self.kept_blocks = 0.0  # what a preemption left in the cache,
        self.kept_since = 0.0  # since when (blocks ever allocated),
        self.kept_behind = 0.0  # and the free blocks that are overwritten before it


class FluidReplica:
    """An engine with its running sequences and its line."""

    def __init__(self, rates: Rates, capacity: Capacity) -> None:
        self.capacity = capacity
        self.waiting: deque[Sequence] = deque()
        self.running = 0
        self.paused = False
        self.next_at = math.inf
        self.preemptions = 0
        self.finished = 0
        self.queried_tokens = 0.0
        self.cached_tokens = 0.0
        self.running_seconds = 0.0
        self.generated_tokens = 0.0
        self.prefill_tokens = 0.0
        self._rates = rates
        self._block = capacity.block_size
        self._blocks = capacity.kv_tokens / capacity.block_size
        self._now = 0.0
        self._speed = 1.0
        self._iterations = 0.0
        self._tokens = 0.0
        self._used = 0.0
        self._allocated = 0.0  # blocks ever
        self._stall = 0.0
        self._ends: list[tuple[float, int, int, Sequence]] = []
        self._admitted: list[tuple[int, Sequence]] = []
        self._order = 0
        self._prompts = PromptCache()
        self._next: Literal["end", "full", "schedule"] = "end"

    @property
    def usage(self) -> float:
        """Part of the KV cache in use, 0 to 1."""
        return min(1.0, max(0.0, self._used) / self._blocks)  # sums of fractions end a little beside 0

    def submit(self, now: float, sequence: Sequence) -> None:
        """Take a request in."""
        self.advance(now)
        self.waiting.append(sequence)
        if not self.paused and self._next != "schedule":
            self._admit()
            self._plan()

    def abort(self, now: float, sequence: Sequence) -> None:
        """Forget a request that has not ended: its client went away."""
        self.advance(now)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            reached = sequence.generated + self._iterations - sequence.joined_at
            self._leave(sequence, sequence.prompt_tokens + reached)
        if not self.paused and self._next != "schedule":
            self._admit()
            self._plan()

    def fire(self, now: float) -> list[Sequence]:
        """Do what is due at `next_at`, and return the sequences that ended."""
        self.advance(now)
        due, self._next = self._next, "end"
        if due == "full":
            self._preempt()
            return []
        if due == "schedule" and self._is_full:
            self._preempt()
            return []
        ended = self._end() if due == "end" else []
        self._admit()
        self._plan()
        return ended

    def pause(self, now: float, clear_cache: bool) -> None:
        """Stop the clock; with `clear_cache` everybody is preempted and the cache forgotten."""
        self.advance(now)
        self.paused = True
        self.next_at = math.inf
        self._next = "end"
        if clear_cache:
            while self._admitted:
                stint, sequence = self._admitted.pop()
                if sequence.stint == stint:
                    self._put_back(sequence)
                    sequence.kept_blocks = 0.0
            self._prompts.clear()
            self._ends.clear()
            for sequence in self.waiting:
                sequence.kept_blocks = 0.0
            self._used = self._tokens = self._stall = 0.0

    def resume(self, now: float) -> None:
        """Let the clock run on."""
        self._now = now
        self.paused = False
        self._admit()
        self._plan()

    def set_speed(self, now: float, speed: float) -> None:
        """Go on at a part of its speed, 0 to 1: others want the same cores."""
        self.advance(now)
        self.next_at = now + (self.next_at - now) * self._speed / speed
        self._speed = speed

    def advance(self, now: float) -> None:
        """Bring tokens and blocks up to date; changes nothing else."""
        seconds, self._now = now - self._now, now
        if seconds <= 0 or self.paused or not self.running:
            return
        self.running_seconds += self.running * seconds
        seconds *= self._speed
        if self._stall >= seconds:
            self._stall -= seconds
            return
        seconds -= self._stall
        self._stall = 0.0
        quadratic, linear = self._growth()
        done = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * quadratic * seconds))
        self._iterations += done
        tokens = done * self.running
        self._tokens += tokens
        self.generated_tokens += tokens
        self._used += tokens / self._block
        self._allocated += tokens / self._block

    @property
    def _is_full(self) -> bool:
        return self._used > self._blocks - SAME and self.running > 1

    def _growth(self) -> tuple[float, float]:
        rates = self._rates
        linear = rates.base_s + rates.sequence_s * self.running + rates.token_s * self._tokens
        return rates.token_s * self.running * 0.5, linear

    def _seconds(self, iterations: float) -> float:
        quadratic, linear = self._growth()
        return self._stall + iterations * (linear + quadratic * iterations)

    def _plan(self) -> None:
        """The next thing that happens by itself: a sequence ends, or the blocks run out."""
        self.next_at = math.inf
        self._next = "end"
        if self.paused or not self.running:
            return
        to_end = self._iterations_to_end()
        to_full = math.inf
        if self.running > 1:
            to_full = max(0.0, (self._blocks - self._used) * self._block / self.running)
        if to_end <= to_full:
            self.next_at = self._now + self._seconds(to_end) / self._speed
        else:
            self._next = "full"
            self.next_at = self._now + self._seconds(to_full) / self._speed

    def _admit(self) -> None:
        waiting = self.waiting
        while waiting and self.running < self.capacity.max_num_seqs:
            sequence = waiting[0]
            context = sequence.prompt_tokens + sequence.generated
            prompt_blocks = sequence.prompt_tokens // self._block
            shared = self._prompts.is_running(sequence.prompt)
            needed = context / self._block + 0.5 - (prompt_blocks if shared else 0)
            # An empty engine takes anything: vLLM refuses what can never fit when it arrives.
            if self._used + needed > self._blocks and self.running:
                return
            waiting.popleft()
            cached = self._cached_blocks(sequence, prompt_blocks, shared) * self._block
            computed = max(1.0, context - cached)
            self.queried_tokens += context
            self.cached_tokens += context - computed
            self.prefill_tokens += computed
            self._stall += self._rates.prefill_token_s * computed
            self._used += needed
            self._allocated += needed if cached < self._block else max(0.0, needed - cached / self._block)
            self._prompts.start(sequence.prompt)
            self.running += 1
            self._tokens += context
            sequence.joined_at = self._iterations
            sequence.stint += 1
            self._order += 1
            end = self._iterations + sequence.completion_tokens - sequence.generated
            heapq.heappush(self._ends, (end, self._order, sequence.stint, sequence))
            self._admitted.append((sequence.stint, sequence))

    def _cached_blocks(self, sequence: Sequence, prompt_blocks: int, shared: bool) -> float:
        cached = 0.0
        if sequence.kept_blocks > 0:
            overwritten = max(0.0, self._allocated - sequence.kept_since - sequence.kept_behind)
            cached = max(0.0, sequence.kept_blocks - overwritten)
        free = self._blocks - self._used
        if shared or self._prompts.age(sequence.prompt, self._allocated) < free:
            return max(cached, prompt_blocks)
        return cached

    def _end(self) -> list[Sequence]:
        ended = []
        ends = self._ends
        while ends:
            end, _, stint, sequence = ends[0]
            if sequence.stint == stint:
                if end > self._iterations + SAME:
                    break
                self._leave(sequence, sequence.prompt_tokens + sequence.completion_tokens)
                sequence.generated = float(sequence.completion_tokens)
                ended.append(sequence)
            heapq.heappop(ends)
        # Without preemptions nobody else takes the ended ones off.
        if len(self._admitted) > 2 * self.running + 64:
            self._admitted = [entry for entry in self._admitted if entry[1].stint == entry[0]]
        self.finished += len(ended)
        return ended

    def _preempt(self) -> None:
        while self._is_full:
            stint, sequence = self._admitted.pop()
            if sequence.stint == stint:
                self._put_back(sequence)
        # The scheduler admits nobody in the iteration that preempted. No sequence goes beyond its end in it.
        self._next = "schedule"
        self.next_at = self._now + self._seconds(min(1.0, self._iterations_to_end())) / self._speed

    def _iterations_to_end(self) -> float:
        """Until the first of the running sequences ends; there is one."""
        ends = self._ends
        while ends[0][3].stint != ends[0][2]:
            heapq.heappop(ends)
        return max(0.0, ends[0][0] - self._iterations)

    def _put_back(self, sequence: Sequence) -> None:
        reached = sequence.generated + self._iterations - sequence.joined_at
        sequence.kept_behind = max(0.0, self._blocks - self._used)
        sequence.kept_blocks = self._leave(sequence, sequence.prompt_tokens + reached)
        # Its last token is generated in an iteration of its own, however near it was.
        sequence.generated = min(sequence.completion_tokens - 1.0, reached)
        sequence.kept_since = self._allocated
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _leave(self, sequence: Sequence, context: float) -> float:
        """Stop running; the blocks that became free."""
        blocks = context / self._block + 0.5
        if not self._prompts.stop(sequence.prompt, self._allocated):
            blocks -= sequence.prompt_tokens // self._block
        self._used -= blocks
        self.running -= 1
        self._tokens -= context
        sequence.stint += 1
        return blocks
