"""One cause of a run's speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What holds a side back, in a few words, what it costs, and one sentence with the recipe's field to change.

    `seconds` are of a step, an estimate of what would be saved without it; None when the log cannot say. A cause that
    is `alone` is said alone, whatever else is found; `alternative` is the end of `next_action` that gives way to other
    advice.
    """

    name: str  # tiny-rows, recompute, compute, other, replicas, client-limit, connections, over-admission, ...
    text: str
    next_action: str
    seconds: float | None = None
    alone: bool = False
    alternative: str = ""
