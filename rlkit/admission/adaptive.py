"""The `rlkit` law of the admission cap: admit what the caches will hold once what is admitted has grown.

A rollout takes no cache when it is admitted and its whole length when it ends, so usage answers to the cap a lifetime
late, and a law that steps up and down by usage alone swings. This one keeps an estimate instead and computes the cap.

* **Load.** Of every replica, the fraction of its cache that one rollout in flight takes: usage / (in flight - waiting).
  It is averaged over turnovers (a turnover is as many completions as the cap allows), because rollouts of one age come
  in waves, and a cap that rides them loses more than it saves. The first estimate is that every rollout is as long as
  max_model_len allows, which is the published start. What fits at that length is admitted in any case: no margin is
  needed where there is no chance.
* **Margin.** n rollouts of random ages and lengths on an engine hold a sum that deviates by about 1/sqrt(n) of its
  mean, so that a replica is filled to 1 / (1 + z/sqrt(n)) on average. z is learned: preemptions for want of cache raise
  it, completions without them lower it, until preemptions are BUDGET of the requests. It stays within bounds, so that
  nothing that preempts (a pause that clears the cache, say) can drive the cap to nothing.
* **Limit.** The worst replica's target / load. A lower limit holds at once. A higher one is approached by GROWTH of
  the completions, and only while the gate holds rollouts back, the servers run something, every replica is heard and
  nothing waits for cache. As growth is paid in completions, an idle or a stuck server earns none, and one that fails
  fast earns no more than it runs.
* **Trim.** Half of the distance between target and usage now, as a fraction of the limit: a wave is met while it is
  there. Changes of the cap within DEAD_BAND are not made, so that it stands still when nothing happens.
* **Waiting.** Requests that wait on the servers at two readings in a row, although others ended in between, do not fit,
  whatever usage says (it can be 0.3 when the servers' own limits are reached): the limit comes down to what runs.
  Nobody has to drain for that to be true, so it does not cut again at the next reading. After that, growth begins anew
  from PROBE.
* **Roster.** A replica that joins or leaves changes every other one's load in proportion, and the limit with it.
* **Silence.** Where nothing is readable the cap stays what it is. Servers that were never readable run at the ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlkit.admission.law import UNMETERED_AFTER, Decision, Reading, Reason, ReplicaState, decide, known_sum

# Seconds. A lifetime is seldom below four of them, and a page of four replicas costs the worker 50 ms to parse.
POLL_S = 2.0

# Standard deviations kept free at first. The sums lean to the right (lengths do, and rollouts of one prompt are alike):
# 2.3 preempted two percent of the requests of the published experiment, simulated, before it had learned more.
MARGIN = 3.0
# Below half a deviation the mean itself preempts; at five, a replica with 64 rollouts still runs at 0.6 usage.
MARGIN_BOUNDS = (0.5, 5.0)
# Preemptions per request that are put up with: half of the one percent that is asked for.
BUDGET = 0.005
# Deviations per preempted fraction of the rollouts in flight: an overflow, which hits about a quarter, costs 0.25.
LEARNING = 1.0
# No single reading moves the margin by more: a burst of preemptions is one event, however often it hits a request.
LARGEST_LESSON = 0.5
# Deviations per turnover that the margin comes down while nothing has been preempted yet: half a one in a hundred.
EAGERNESS = 0.005

# Turnovers that the load is averaged over; in the beginning half of those there have been, at least one. Over one, the
# cap followed every wave: simulated on the published bed, three times the preemptions for a percent less throughput,
# with a margin of 2.7 to begin with.
WINDOW = 3.0

# Of the completions, how many more are admitted: at most twice as many rollouts in flight per turnover, which the load,
# averaged over as long, can follow.
GROWTH = 1.0
# The same just after saturation: one in twenty, so that the next probe costs a few waiting requests only.
PROBE = 0.05
# A turnover without saturation quickens growth by a quarter: thirteen turnovers from PROBE to GROWTH.
QUICKENING = 1.25

# Cap per usage off target. On the simulated published bed 1 and 2 answered waves with waves, and 0.25 trained on half a
# percent less than 0.5 with as few preemptions.
TRIM = 0.5
# The trim stays within these: a reading is one moment of a wave.
TRIM_BOUNDS = (0.8, 1.1)
# Fraction of the cap within which it stays: what two readings of a steady server differ by.
DEAD_BAND = 0.03

# A cache this full preempts for want of room; below it at two readings, a pause that cleared the cache did.
FULL = 0.9
# Of those that ran, the fraction preempted at once that only such a pause explains.
FLUSHED = 0.5
# Readings after such a pause in which waiting requests are those that come back: half a minute of recomputing.
FLUSH_READINGS = 15
# Fraction of the rollouts that may wait on the servers unheeded: arrivals of the moment.
WAITING_SLACK = 0.02

# Readings after which a silent replica counts as gone: a sync or a long garbage collection is shorter.
LEFT_AFTER = 8
# Rollouts per replica to begin with where the size of the cache is unknown: they fit any cache that serves at all.
BLIND_START = 4


@dataclass
class _Replica:
    load: float | None  # fraction of its cache per rollout in flight anywhere
    capacity: int | None
    state: ReplicaState
    silent: int = 0
    flushed: int = 0  # readings for which waiting is still explained by a pause that cleared the cache


class AdaptiveLaw:
    """The `rlkit` policy; `ceiling` is max_inflight_tasks, `max_model_len` in tokens."""

    poll_s = POLL_S

    def __init__(self, *, ceiling: int, max_model_len: int) -> None:
        self._ceiling = max(1, ceiling)
        self._max_model_len = max(1, max_model_len)
        self._cap = 1
        self._limit = 1.0
        self._replicas: dict[str, _Replica] = {}
        self._unread = 0
        self._margin = MARGIN
        self._preempted = False
        self._growth = GROWTH
        self._turnovers = 0.0

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight; 1 until the first reading."""
        return self._cap

    def observe(self, reading: Reading) -> Decision:
        """Take a reading."""
        seen = {name: state for name, state in reading.readable.items() if state.usage is not None}
        if not self._replicas:
            return self._begin(reading, seen)
        if not seen:
            return decide(reading, self._cap, "blind", f"No usage could be read; the cap stays at {self._cap}.")
        moved = self._call_roll(seen)
        turnover = min(1.0, reading.completed / self._limit)
        self._learn(seen, reading.completed)
        waiting = self._lasting(seen) if reading.completed else 0
        self._weigh(seen, reading, turnover)
        name, target, usage = self._worst(seen)
        load = self._replicas[name].load
        wanted = target / load if load else math.inf
        certain = self._certain()
        if load is None or load * certain <= 1:  # a load above says that the capacity is not what the server claims
            wanted = max(wanted, certain)
        if waiting > WAITING_SLACK * reading.in_flight:
            wanted = min(wanted, self._limit, max(1.0, reading.in_flight - waiting))
            self._growth = PROBE
        else:
            waiting = 0
            self._growth = min(GROWTH, self._growth * QUICKENING**turnover)
        may_grow = self._may_grow(seen, reading)
        if wanted < self._limit:
            self._limit = wanted
        elif may_grow:
            earned = min(reading.completed, known_sum(state.running for state in seen.values()) or 0)
            self._limit = min(wanted, self._limit + self._growth * earned)
        self._limit = min(max(1.0, self._limit), self._ceiling)
        low, high = TRIM_BOUNDS
        aimed = self._limit * min(high if may_grow else 1.0, max(low, 1 + TRIM * (target - usage)))
        return self._settle(reading, aimed, waiting, moved, f"Replica {name}: KV usage {usage:.2f}, aim {target:.2f}")

    def _begin(self, reading: Reading, seen: Mapping[str, ReplicaState]) -> Decision:
        if not seen:
            self._unread += 1
            if self._unread < UNMETERED_AFTER:
                return decide(reading, self._cap, "blind", "No metrics could be read yet.")
            self._cap = self._ceiling
            text = f"No server has had readable metrics: the cap is the ceiling of {self._cap}."
            return decide(reading, self._cap, "unmetered", text)
        for name, state in seen.items():
            self._replicas[name] = _Replica(None, state.capacity_tokens, state)
            if state.capacity_tokens:
                self._replicas[name].load = self._max_model_len / state.capacity_tokens / len(seen)
        certain = self._certain()
        if certain:
            self._limit = min(max(1.0, certain), self._ceiling)
            text = f"{int(self._limit)} sequences of {self._max_model_len:,} tokens fit into the caches."
        else:
            self._limit = min(BLIND_START * len(seen), self._ceiling)
            text = f"The caches' size is unknown: from {int(self._limit)}."
        self._cap = int(self._limit)
        return decide(reading, self._cap, "sized", text)

    def _certain(self) -> float:
        """Rollouts that fit however long they become, evenly spread; 0 where the size of a cache is unknown."""
        capacities = [replica.capacity or 0 for replica in self._replicas.values()]
        return len(capacities) * min(capacities) / self._max_model_len

    def _call_roll(self, seen: Mapping[str, ReplicaState]) -> str | None:
        """Take replicas in and out; says which."""
        before = len(self._replicas)
        for name, replica in self._replicas.items():
            replica.silent = 0 if name in seen else replica.silent + 1
        left = [name for name, replica in self._replicas.items() if replica.silent >= LEFT_AFTER]
        joined = [name for name in seen if name not in self._replicas]
        if not left and not joined:
            return None
        for name in left:
            del self._replicas[name]
        ratio = before / (len(self._replicas) + len(joined))
        for replica in self._replicas.values():
            replica.load = replica.load and replica.load * ratio
        known = [(one.load, one.capacity) for one in self._replicas.values() if one.load and one.capacity]
        for name in joined:
            state = seen[name]
            self._replicas[name] = _Replica(None, state.capacity_tokens, state)
            if known and state.capacity_tokens:
                tokens = max(load * capacity for load, capacity in known)
                self._replicas[name].load = tokens / state.capacity_tokens
        self._limit /= ratio
        words = [f"replica {name} joined" for name in joined] + [f"replica {name} left" for name in left]
        return ", ".join(words)

    def _learn(self, seen: Mapping[str, ReplicaState], completed: int) -> None:
        """Take preemptions into the margin."""
        preempted = 0
        for name, state in seen.items():
            replica = self._replicas[name]
            replica.flushed = max(0, replica.flushed - 1)
            count = state.preemptions or 0
            before = replica.state
            full = max(state.usage or 0.0, before.usage or 0.0) >= FULL
            if count and not full and count >= FLUSHED * (before.running or 0):
                replica.flushed = FLUSH_READINGS
            else:
                preempted += count
        if preempted:
            self._preempted = True
            self._growth = PROBE
        lesson = LEARNING * (preempted - BUDGET * completed) / self._limit
        if not self._preempted:
            lesson -= EAGERNESS * completed / self._limit
        low, high = MARGIN_BOUNDS
        self._margin = min(high, max(low, self._margin + min(LARGEST_LESSON, lesson)))

    def _lasting(self, seen: Mapping[str, ReplicaState]) -> int:
        """Requests that wait for cache now and did at the reading before."""
        lasting = 0
        for name, state in seen.items():
            replica = self._replicas[name]
            if not _waiting(state):
                replica.flushed = 0
            elif not replica.flushed and (state.usage or 0.0) < FULL:
                lasting += min(_waiting(state), _waiting(replica.state))
        return lasting

    def _weigh(self, seen: Mapping[str, ReplicaState], reading: Reading, turnover: float) -> None:
        """Take usage into the loads."""
        waiting = known_sum(state.waiting for state in seen.values()) or 0
        running = known_sum(state.running for state in seen.values()) or 0
        # At least what runs: the gate's count is of another moment, and others may use the servers.
        sharing = max(1, running, reading.in_flight - waiting)
        self._turnovers += turnover
        weight = 1 - math.exp(-turnover / min(WINDOW, max(1.0, self._turnovers / 2)))
        for name, state in seen.items():
            replica = self._replicas[name]
            replica.state = state
            replica.capacity = state.capacity_tokens or replica.capacity
            if state.usage is not None and reading.in_flight:
                load = state.usage / sharing
                replica.load = load if replica.load is None else replica.load + weight * (load - replica.load)

    def _worst(self, seen: Mapping[str, ReplicaState]) -> tuple[str, float, float]:
        """The replica with the least room for more: its name, target and usage."""

        def target(name: str) -> float:
            running = seen[name].running or self._limit / len(self._replicas)
            return 1 / (1 + self._margin / math.sqrt(max(1.0, running / seen[name].engines)))

        name = max(seen, key=lambda name: (self._replicas[name].load or 0.0) / target(name))
        return name, target(name), seen[name].usage or 0.0

    def _may_grow(self, seen: Mapping[str, ReplicaState], reading: Reading) -> bool:
        heard = len(seen) == len(self._replicas)
        quiet = not any(_waiting(state) for state in seen.values())
        runs = any(state.running for state in seen.values())
        return heard and quiet and runs and reading.held > 0

    def _settle(self, reading: Reading, aimed: float, waiting: int, moved: str | None, seen: str) -> Decision:
        before = self._cap
        cap = max(1, min(self._ceiling, int(aimed)))
        at_the_end = cap == self._ceiling or self._limit == 1.0
        if abs(cap - before) > DEAD_BAND * before or at_the_end or moved:
            self._cap = cap
        if waiting:
            seen += f", {waiting} of {reading.in_flight} keep waiting"
        if moved:
            seen += f"; {moved}"
        if self._cap == before:
            return decide(reading, self._cap, "held", f"{seen}: the cap stays at {self._cap}.")
        reason: Reason = "resized" if moved else "cut" if self._cap < before else "grown"
        return decide(reading, self._cap, reason, f"{seen}: from {before} to {self._cap}.")


def _waiting(state: ReplicaState) -> int:
    return (state.waiting if state.waiting_for_capacity is None else state.waiting_for_capacity) or 0
