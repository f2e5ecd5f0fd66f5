"""What TRL logs of a window of time: values by metric name, reduced the way `_reduce_metric` in TRL 1.16 does."""

from __future__ import annotations

import math
from collections import defaultdict


class Window:
    """Collects until `reduce`."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._ratios: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, value: float) -> None:
        """One value of a gauge, or of a counter (a name with `total`)."""
        self._values[name].append(value)

    def add_ratio(self, name: str, over: float, under: float) -> None:
        """A part of a ratio of sums."""
        ratio = self._ratios[name]
        ratio[0] += over
        ratio[1] += under

    def reduce(self) -> dict[str, float]:
        """One number per metric, absent where nothing was added; the window is empty afterwards."""
        row = {name: _reduce(name, values) for name, values in self._values.items()}
        row |= {name: over / under for name, (over, under) in self._ratios.items() if under}
        self._values.clear()
        self._ratios.clear()
        return row


def _reduce(name: str, values: list[float]) -> float:
    words = name.rpartition("/")[2].split("_")
    if "total" in words:
        return math.fsum(values)
    if "max" in words:
        return max(values)
    if "min" in words:
        return min(values)
    return math.fsum(values) / len(values)
