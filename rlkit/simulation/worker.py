"""TRL's rollout worker: it keeps its slots filled, scores groups that are complete, and fills the trainer's queue.

* A slot that is free is refilled at once, with the next rollout of the group that was begun last.
* Rollouts pass the admission gate (rlkit.admission) in the order they were made. A group bears the policy version at
  which its first rollout was admitted; the adapter is that of the moment of dispatch.
* A group is handed over when all its rollouts have ended. While the queue of groups to score is full, the loop stands
  still: it neither collects nor refills. One group is scored at a time.
* A full queue, of groups as of samples, is tried again every `poll_s` seconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from rlkit.admission.gate import Gate
from rlkit.admission.gauges import RECENT_ROLLOUTS, gauges, percentiles
from rlkit.admission.law import Decision, Reading
from rlkit.simulation.events import EventLoop
from rlkit.simulation.fleet import Fleet
from rlkit.simulation.rollout import Group, Rollout, Sample
from rlkit.simulation.setup import Setup
from rlkit.simulation.window import Window


class Worker:
    """The generate loop, the gate with its law, and the score loop.

    `progress` says which part of the run's steps is done, and lengths follow it. `version` is the policy that is
    served.
    """

    def __init__(
        self, loop: EventLoop, setup: Setup, window: Window, dice: random.Random, progress: Callable[[], float]
    ) -> None:
        self.version = 0
        self.buffer: deque[Sample] = deque()
        self.decisions: list[Decision] = []
        self.dispatched = 0
        self.generated_tokens = 0
        self.law = setup.make_law()
        self._fleet = Fleet(loop, setup, self._ended)
        self._loop = loop
        self._setup = setup
        self._window = window
        self._dice = dice
        self._progress = progress
        self._gate: Gate[Rollout] = Gate(1)
        self._free_slots = setup.max_inflight
        self._group: Group | None = None
        self._groups = 0
        self._group_left = 0
        self._uncollected: deque[Rollout] = deque()
        self._blocked: Group | None = None
        self._blocked_since = 0.0
        self._to_score: deque[Group] = deque()
        self._scoring = False
        self._inflight_gauge = 0
        self._collected_tokens = 0
        self._pushed_tokens = 0
        self._pushed_at = 0.0
        self._put_blocked_since: float | None = None
        self._taker: Callable[[], None] | None = None
        self._read_completed = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_ROLLOUTS)  # (from admission, with the gate), s

    @property
    def fleet(self) -> Fleet:
        """The servers it generates on."""
        return self._fleet

    def start(self) -> None:
        """Begin to generate."""
        self._pushed_at = self._loop.now
        self._observe()
        self._generate()

    def when_filled(self, taker: Callable[[], None]) -> None:
        """Call `taker` once there is a sample in the buffer."""
        self._taker = taker

    # The generate loop.

    def _generate(self) -> None:
        while True:
            while self._uncollected:
                rollout = self._uncollected.popleft()
                self._free_slots += 1
                self._collected_tokens += rollout.completion_tokens
                group = rollout.group
                if group.completions is None:
                    group.completions = []
                group.completions.append(rollout.completion_tokens)
                if len(group.completions) == self._setup.num_generations:
                    group.queued_at = self._loop.now
                    if len(self._to_score) >= self._setup.score_queue_groups:
                        self._blocked, self._blocked_since = group, self._loop.now
                        self._loop.after(self._setup.poll_s, self._retry_hand_over)
                        return
                    self._to_score.append(group)
                    self._score_next()
            while self._free_slots:
                self._free_slots -= 1
                self._admit(self._gate.arrive(self._next_rollout()))
            self._inflight_gauge = self._setup.max_inflight - self._free_slots
            if not self._uncollected:
                return

    def _retry_hand_over(self) -> None:
        if len(self._to_score) >= self._setup.score_queue_groups:
            self._loop.after(self._setup.poll_s, self._retry_hand_over)
            return
        assert self._blocked is not None
        self._window.add("rollout/score_block_s", self._loop.now - self._blocked_since)
        self._to_score.append(self._blocked)
        self._blocked = None
        self._score_next()
        self._generate()

    def _next_rollout(self) -> Rollout:
        if self._group is None or not self._group_left:
            number = self._groups
            self._groups += 1
            lengths = self._setup.lengths
            self._group = Group(number, number % lengths.prompts, lengths.prompt(number))
            self._group_left = self._setup.num_generations
        self._group_left -= 1
        return Rollout(self._group, made_at=self._loop.now)

    def _admit(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            if rollout.group.version is None:
                rollout.group.version = self.version
            rollout.version = self.version
            rollout.admitted_at = self._loop.now
            rollout.completion_tokens = self._setup.lengths.completion(
                rollout.group.prompt, self._progress(), self._dice
            )
            self.dispatched += 1
            self._fleet.dispatch(rollout)

    def _ended(self, rollouts: list[Rollout]) -> None:
        admitted: list[Rollout] = []
        for rollout in rollouts:
            tokens = rollout.completion_tokens
            self.generated_tokens += tokens
            self._note(rollout)
            self._window.add("rollout/turns_mean", 1.0)
            self._window.add("completions/max_length", tokens)
            self._window.add("completions/min_length", tokens)
            self._window.add("completions/mean_length", tokens)
            self._window.add("completions/clipped_ratio", float(tokens >= self._setup.lengths.longest))
            admitted += self._gate.leave(rollout)
        self._admit(admitted)
        self._uncollected.extend(rollouts)
        if self._blocked is None:
            self._generate()

    def _note(self, rollout: Rollout) -> None:
        dispatched, whole = self._loop.now - rollout.admitted_at, self._loop.now - rollout.made_at
        self._recent.append((dispatched, whole))
        self._window.add("rollout/duration_s", dispatched)
        self._window.add("rollout/gate_wait_s", whole - dispatched)
        self._window.add("rollout/duration_with_gate_s", whole)
        self._window.add("rollout/completed_total", 1.0)

    # The law of the cap.

    def _observe(self) -> None:
        states = self._fleet.states()
        completed, self._read_completed = self._gate.completed - self._read_completed, self._gate.completed
        reading = Reading(self._loop.now, states, self._gate.in_flight, self._gate.held, completed)
        decision = self.law.observe(reading)
        self.decisions.append(decision)
        for name, value in (gauges(decision) | percentiles(self._recent)).items():
            self._window.add(name, value)
        self._admit(self._gate.set_cap(decision.cap))
        self._loop.after(self.law.poll_s, self._observe)

    # The score loop.

    def _score_next(self) -> None:
        if self._scoring or not self._to_score:
            return
        self._scoring = True
        group = self._to_score.popleft()
        self._window.add("rollout/score_wait_s", self._loop.now - group.queued_at)
        seconds = self._setup.score_s
        if self._setup.score_variation:
            shape = 1 / self._setup.score_variation**2
            # Whole microseconds: see rlkit.simulation.lengths.
            seconds = round(seconds * self._dice.gammavariate(shape, 1 / shape), 6)
        self._loop.after(seconds, self._scored, group, seconds)

    def _scored(self, group: Group, seconds: float) -> None:
        window = self._window
        window.add("rollout/score_s", seconds)
        window.add("rollout/score_queue_size", float(len(self._to_score)))
        window.add("rollout/inflight", float(self._inflight_gauge))
        tokens, self._pushed_tokens = self._collected_tokens - self._pushed_tokens, self._collected_tokens
        window.add_ratio("rollout/generated_tok_s", tokens, self._loop.now - self._pushed_at)
        self._pushed_at = self._loop.now
        assert group.completions is not None
        self._put(group, 0)

    def _put(self, group: Group, first: int) -> None:
        completions = group.completions or []
        for position in range(first, len(completions)):
            if len(self.buffer) >= self._setup.queue_maxsize:
                if self._put_blocked_since is None:
                    self._put_blocked_since = self._loop.now
                self._loop.after(self._setup.poll_s, self._put, group, position)
                return
            if self._put_blocked_since is not None:
                self._window.add("rollout/backpressure_s", self._loop.now - self._put_blocked_since)
                self._put_blocked_since = None
            version = group.version or 0
            self.buffer.append(
                Sample(group.number, version, group.prompt.tokens, completions[position], self._loop.now)
            )
            if self._taker is not None:
                taker, self._taker = self._taker, None
                self._loop.at(self._loop.now, taker)
        self._scoring = False
        self._score_next()
