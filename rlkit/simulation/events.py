"""The simulator's clock: one heap of actions, each at its time; those of one time in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Runs actions in the order of their times. Seconds; nothing here waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._stopped = False

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at `time`."""
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, action, arguments))

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` in `delay` seconds."""
        self.at(self.now + delay, action, *arguments)

    def stop(self) -> None:
        """End `run` after the action that is running."""
        self._stopped = True

    def run(self, until: float = float("inf")) -> None:
        """Run until `stop`, until nothing is left, or up to a time."""
        self._stopped = False
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped and heap[0][0] <= until:
            self.now, _, action, arguments = pop(heap)
            self.events += 1
            action(*arguments)
