"""The published law of the admission cap, as it was published.

* It starts at the tokens that all KV caches hold, divided by max_model_len, and is never above the ceiling.
* Every 5 s: usage above 0.8 cuts the cap by 30 %. A cut latches: no other one follows until the rollouts in flight have
  come down to the new cap.
* Usage below 0.6 and nothing queued grows it by 25 %, once per turnover of the pool: after as many rollouts have ended
  as the cap allowed, counted from the last change.
* Nothing in flight is cancelled. Of several replicas the highest usage counts.

What the publication leaves open is decided for safety: where nothing is readable the last cap stays, and servers that
never were readable run at the ceiling. A cut takes away at least one and growth adds at least one.
"""

from __future__ import annotations

import math

from rlkit.admission.law import UNMETERED_AFTER, Decision, Reading, decide, known_sum

# The published constants.
POLL_S = 5.0
HIGH_USAGE = 0.8
LOW_USAGE = 0.6
CUT = 0.7
GROWTH = 1.25


class PublishedLaw:
    """The published policy; `ceiling` is max_inflight_tasks, `max_model_len` in tokens."""

    poll_s = POLL_S

    def __init__(self, *, ceiling: int, max_model_len: int) -> None:
        self._ceiling = max(1, ceiling)
        self._max_model_len = max(1, max_model_len)
        self._cap = 1
        self._sized = False
        self._unread = 0
        self._latched = False
        self._ended = 0  # rollouts since the last change

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight; 1 until the first reading."""
        return self._cap

    def observe(self, reading: Reading) -> Decision:
        """Take a reading."""
        states = reading.readable.values()
        usages = [state.usage for state in states if state.usage is not None]
        queued = known_sum(state.waiting for state in states)
        self._ended += reading.completed
        if not self._sized:
            return self._size(reading, known_sum(state.capacity_tokens for state in states), bool(usages))
        if not usages:
            return decide(reading, self._cap, "blind", f"No usage could be read; the cap stays at {self._cap}.")
        usage = max(usages)
        if self._latched and reading.in_flight <= self._cap:
            self._latched = False
        if usage > HIGH_USAGE and self._latched:
            text = f"KV usage {usage:.2f}, but {reading.in_flight} are still in flight over the cap of {self._cap}."
            return decide(reading, self._cap, "latched", text)
        if usage > HIGH_USAGE:
            before, self._cap = self._cap, max(1, math.floor(self._cap * CUT))
            self._latched = reading.in_flight > self._cap
            self._ended = 0
            text = f"KV usage {usage:.2f} is above {HIGH_USAGE}: from {before} to {self._cap}."
            return decide(reading, self._cap, "cut" if self._cap < before else "held", text)
        if usage < LOW_USAGE and queued == 0 and self._cap < self._ceiling and self._ended >= self._cap:
            before, self._cap = self._cap, min(self._ceiling, math.ceil(self._cap * GROWTH))
            self._ended = 0
            text = f"KV usage {usage:.2f} is below {LOW_USAGE} and nothing is queued: from {before} to {self._cap}."
            return decide(reading, self._cap, "grown", text)
        return decide(reading, self._cap, "held", f"KV usage {usage:.2f}; the cap stays at {self._cap}.")

    def _size(self, reading: Reading, capacity_tokens: int | None, usage_known: bool) -> Decision:
        if capacity_tokens is not None:
            self._sized = True
            self._cap = min(self._ceiling, max(1, capacity_tokens // self._max_model_len))
            text = f"The KV caches hold {capacity_tokens:,} tokens, {self._cap} sequences of {self._max_model_len:,}."
            return decide(reading, self._cap, "sized", text)
        if usage_known:
            self._sized = True
            self._cap = self._ceiling
            return decide(reading, self._cap, "sized", f"The caches' size is unknown: from the ceiling of {self._cap}.")
        self._unread += 1
        if self._unread < UNMETERED_AFTER:
            return decide(reading, self._cap, "blind", "No metrics could be read yet.")
        self._cap = self._ceiling
        text = f"No server has had readable metrics: the cap is the ceiling of {self._cap}."
        return decide(reading, self._cap, "unmetered", text)
