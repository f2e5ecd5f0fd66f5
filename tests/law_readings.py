"""Readings for tests of the laws."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.admission.law import Decision, Law, Reading, ReplicaState

CAPACITY = 100_000
LONGEST = 5_000


def state(
    usage: float | None = 0.5,
    running: int | None = 10,
    waiting: int | None = 0,
    preemptions: int | None = 0,
    capacity: int | None = CAPACITY,
    restarted: bool = False,
) -> ReplicaState:
    return ReplicaState(usage, running, waiting, waiting, preemptions, capacity, restarted)


@dataclass
class Bench:
    """A law with its clock: every call is one reading, `poll_s` later."""

    law: Law
    time: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    def see(
        self, *states: ReplicaState | None, in_flight: int | None = None, held: int = 50, completed: int = 0
    ) -> Decision:
        """One reading of these replicas; in flight: what the cap allows."""
        replicas = {str(number): one for number, one in enumerate(states)}
        admitted = self.law.cap if in_flight is None else in_flight
        decision = self.law.observe(Reading(self.time, replicas, admitted, held, completed))
        assert decision.cap == self.law.cap >= 1
        assert decision.time == self.time
        self.time += self.law.poll_s
        self.decisions.append(decision)
        return decision


@dataclass
class Fluid:
    """A server without chance: `tokens` of cache per rollout, a lifetime of `polls` readings."""

    tokens: float
    capacity: int = CAPACITY
    polls: int = 8
    max_running: int = 10_000

    def load(self, in_flight: int) -> ReplicaState:
        fits = min(self.max_running, int(self.capacity / self.tokens))
        running = min(in_flight, fits)
        return state(
            usage=running * self.tokens / self.capacity,
            running=running,
            waiting=in_flight - running,
            capacity=self.capacity,
        )


def run(bench: Bench, servers: list[Fluid], readings: int, rollouts: int) -> None:
    """Let the law govern servers that share what is admitted evenly, `rollouts` being ready at any time."""
    in_flight = 0
    for _ in range(readings):
        in_flight = max(in_flight, min(bench.law.cap, rollouts))
        share = in_flight // len(servers)
        states = [server.load(share) for server in servers]
        completed = sum(one.running or 0 for one in states) // servers[0].polls
        bench.see(*states, in_flight=in_flight, held=rollouts - in_flight, completed=completed)
        in_flight -= completed
