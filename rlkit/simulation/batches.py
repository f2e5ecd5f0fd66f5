"""How samples become rows: TRL's two planners. One row per rank makes a microbatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rlkit.simulation.rollout import Sample


@dataclass(slots=True)
class Row:
    """The samples that one rank forwards together. `load` stands for attention: the sum of squared lengths."""

    samples: list[Sample] = field(default_factory=list)
    tokens: int = 0
    load: int = 0

    def add(self, sample: Sample) -> None:
        """Put a sample in."""
        self.samples.append(sample)
        self.tokens += sample.tokens
        self.load += sample.tokens**2


class Planner(Protocol):
    """Takes samples one by one."""

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch that this sample closes, if it closes one."""

    def takes(self, sample: Sample) -> bool:
        """Whether the sample fits into any row at all."""


class FixedCount:
    """A fixed number of samples, spread over the ranks longest first."""

    def __init__(self, processes: int, per_device: int) -> None:
        self._processes = processes
        self._count = processes * per_device
        self._samples: list[Sample] = []

    def takes(self, sample: Sample) -> bool:
        """Every length does."""
        return True

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch when this was its last sample."""
        self._samples.append(sample)
        if len(self._samples) < self._count:
            return None
        rows = [Row() for _ in range(self._processes)]
        for placed in sorted(self._samples, key=lambda sample: -sample.tokens):
            min(rows, key=lambda row: row.load).add(placed)
        self._samples = []
        return rows


class TokenBudget:
    """Each sample into the fitting row with the least load; when none fits, the microbatch closes before it."""

    def __init__(self, processes: int, budget: int) -> None:
        self._processes = processes
        self._budget = budget
        self._rows = [Row() for _ in range(processes)]

    def takes(self, sample: Sample) -> bool:
        """A sample longer than a row is dropped."""
        return sample.tokens <= self._budget

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch that was full before this sample."""
        closed = None
        fitting = [row for row in self._rows if row.tokens + sample.tokens <= self._budget]
        if not fitting:
            closed, self._rows = self._rows, [Row() for _ in range(self._processes)]
            fitting = self._rows
        min(fitting, key=lambda row: row.load).add(sample)
        return closed
