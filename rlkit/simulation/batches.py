"""How samples become rows: TRL's two planners. One row per rank makes a microbatch.

From 1.16 on TRL folds a row into a tree, so that a token which several of its samples begin with is forwarded once: a
prompt by its rollouts, a chat template by all, and the common beginnings of completions. `Sharing` says how many those
are. Without it every sample is forwarded whole, as the published runs did it with 1.14.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rlkit.simulation.rollout import Sample


@dataclass(frozen=True)
class Sharing:
    """What a sample finds in its row: the template; beside one of its group the prompt and part of its answer, too."""

    template_tokens: int
    completion_share: float


@dataclass(slots=True)
class Row:
    """The samples that one rank forwards together. `load` stands for attention: the sum of squared lengths.

    `tokens` are forwarded, each that is shared once; `trained` are the completions'.
    """

    sharing: Sharing | None = None
    samples: list[Sample] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)
    tokens: int = 0
    trained: int = 0
    load: int = 0

    def shared(self, sample: Sample) -> int:
        """How many of its tokens a sample would find here."""
        if self.sharing is None or not self.samples:
            return 0
        if sample.group in self.groups:
            return sample.prompt_tokens + int(self.sharing.completion_share * sample.completion_tokens)
        return min(self.sharing.template_tokens, sample.prompt_tokens)

    def fits(self, sample: Sample, budget: int) -> bool:
        """Whether neither what is forwarded nor what is trained on goes beyond the budget."""
        whole = self.tokens + sample.tokens - self.shared(sample)
        return whole <= budget and self.trained + sample.completion_tokens <= budget

    def add(self, sample: Sample) -> None:
        """Put a sample in."""
        shared = self.shared(sample)
        self.samples.append(sample)
        if self.sharing is not None:
            self.groups.add(sample.group)
        self.tokens += sample.tokens - shared
        self.trained += sample.completion_tokens
        self.load += sample.tokens**2 - shared**2


class Planner(Protocol):
    """Takes samples one by one."""

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch that this sample closes, if it closes one."""

    def takes(self, sample: Sample) -> bool:
        """Whether the sample fits into any row at all."""


class FixedCount:
    """A fixed number of samples, spread over the ranks longest first; with `sharing` a group stays together."""

    def __init__(self, processes: int, per_device: int, sharing: Sharing | None = None) -> None:
        self._processes = processes
        self._count = processes * per_device
        self._sharing = sharing
        self._samples: list[Sample] = []

    def takes(self, sample: Sample) -> bool:
        """Every length does."""
        return True

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch when this was its last sample."""
        self._samples.append(sample)
        if len(self._samples) < self._count:
            return None
        rows = [Row(self._sharing) for _ in range(self._processes)]
        for placed in sorted(self._together(), key=lambda row: -row.load):
            row = min(rows, key=lambda row: row.load)
            for one in placed.samples:
                row.add(one)
        self._samples = []
        return rows

    def _together(self) -> list[Row]:
        """The samples that go into one row; the largest group is halved until there is one for each rank."""
        if self._sharing is None:
            groups = [[sample] for sample in self._samples]
        else:
            of_group: dict[int, list[Sample]] = {}
            for sample in self._samples:
                of_group.setdefault(sample.group, []).append(sample)
            groups = list(of_group.values())
            while len(groups) < self._processes:
                largest = groups.pop(max(range(len(groups)), key=lambda number: len(groups[number])))
                groups += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        rows = []
        for group in groups:
            rows.append(Row(self._sharing))
            for sample in group:
                rows[-1].add(sample)
        return rows


class TokenBudget:
    """Each sample into the fitting row with the least load; when none fits, the microbatch closes before it.

    With `sharing` the rows that hold its group come first, and when none of them has room the microbatch closes, unless
    a row is still empty.
    """

    def __init__(self, processes: int, budget: int, sharing: Sharing | None = None) -> None:
        self._processes = processes
        self._budget = budget
        self._sharing = sharing
        self._rows = self._empty()

    def takes(self, sample: Sample) -> bool:
        """A sample longer than a row is dropped."""
        return sample.tokens <= self._budget

    def add(self, sample: Sample) -> list[Row] | None:
        """The microbatch that was full before this sample."""
        closed = None
        fitting = self._fitting(sample)
        if not fitting:
            closed, self._rows = self._rows, self._empty()
            fitting = self._rows
        min(fitting, key=lambda row: row.load).add(sample)
        return closed

    def _empty(self) -> list[Row]:
        return [Row(self._sharing) for _ in range(self._processes)]

    def _fitting(self, sample: Sample) -> list[Row]:
        home = [row for row in self._rows if sample.group in row.groups]
        fitting = [row for row in home if row.fits(sample, self._budget)]
        if fitting or (home and all(row.samples for row in self._rows)):
            return fitting
        return [row for row in self._rows if row.fits(sample, self._budget)]
