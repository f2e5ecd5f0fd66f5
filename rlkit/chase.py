"""A chase: run, diagnose, change, run again, until no change pays. What comes next follows from the runs so far. Pure.

Each run begins from the best one yet. A change that brought nothing is not tried again from there, one whose run failed
not at all, and a chase never ends on a recipe that is slower than the one it began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from rlkit.advice import WORTHWHILE
from rlkit.counsel import Advice, Figures, Limits, Objective, score

# The published chase has five runs; one more finds out that nothing is left.
MAX_RUNS = 6

# Times of one recipe differ by so much from run to run; a run is not slower for it.
SAME_TIME = 1.01


@dataclass(frozen=True)
class Rules:
    """What a chase is after, and when it ends."""

    objective: Objective = "time"
    limits: Limits = field(default_factory=Limits)
    max_runs: int = MAX_RUNS
    learning: bool = False
    worthwhile: float = WORTHWHILE


@dataclass(frozen=True)
class Probe:
    """One run of a chase; figures are of the whole number of steps, measured by `steps` of them."""

    number: int
    recipe: str  # its file in the chase's folder
    folder: str  # its run's folder there
    parent: int | None = None  # the number of the run whose recipe was changed
    changes: str = ""
    overrides: tuple[str, ...] = ()
    predicted: Figures | None = None
    side_effects: tuple[str, ...] = ()
    figures: Figures | None = None  # None: the run failed
    steps: int = 0
    minutes: float = 0.0  # of the steps it made
    usd: float | None = None  # for them
    failure: str = ""
    bound: str = ""
    headline: str = ""
    causes: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    unadvised: str = ""  # why there is no advice


@dataclass(frozen=True)
class Start:
    """Run the recipe as it is."""


@dataclass(frozen=True)
class Try:
    """Change the recipe of a run, and run that."""

    parent: Probe
    advice: Advice


@dataclass(frozen=True)
class Stop:
    """The end, and why."""

    reason: str


def decide(probes: Sequence[Probe], rules: Rules) -> Start | Try | Stop:
    """What comes after these runs."""
    if not probes:
        return Start()
    best = best_of(probes, rules)
    if best is None:
        return Stop(f"the first run failed: {probes[0].failure}")
    if best.unadvised:
        return Stop(best.unadvised)
    left = [one for one in best.advice if not _was_tried(one, best, probes)]
    worth = [one for one in left if one.gain >= rules.worthwhile and _is_no_slower(one.predicted, probes)]
    if not worth:
        most = max((one.gain for one in left), default=0.0)
        of = "cost" if rules.objective == "cost" else "time"
        least = f"the most that a change is predicted to save is {max(0.0, most):.0%} of the {of}"
        return Stop(f"{least}, less than {rules.worthwhile:.0%}")
    if len(probes) >= rules.max_runs:
        return Stop(
            f"--max-runs {rules.max_runs} are made; {worth[0].changes} is predicted to save {worth[0].gain:.0%} more"
        )
    return Try(best, worth[0])


def best_of(probes: Sequence[Probe], rules: Rules) -> Probe | None:
    """The run with the least time or cost, within the limits where one is, and none slower than the first."""
    measured = [probe for probe in probes if probe.figures is not None]
    if not probes or probes[0].figures is None:
        return None

    def rank(probe: Probe) -> tuple[float, int]:
        assert probe.figures is not None
        return score(probe.figures, rules.objective, rules.limits), probe.number

    return min((probe for probe in measured if _is_no_slower(probe.figures, probes)), key=rank)


def _is_no_slower(figures: Figures | None, probes: Sequence[Probe]) -> bool:
    first = probes[0].figures
    if figures is None or first is None:
        return False
    return figures is first or figures.wall_clock_min <= SAME_TIME * first.wall_clock_min


def _was_tried(advice: Advice, best: Probe, probes: Sequence[Probe]) -> bool:
    return any(
        probe.overrides == advice.overrides and (probe.figures is None or probe.parent == best.number)
        for probe in probes
    )


@dataclass(frozen=True)
class Scoreboard:
    """A chase so far: what it set out from and what came of it. `stopped` is empty while it goes on."""

    name: str
    start: str  # the recipe's name
    engine: str
    steps: int  # of the whole run, which minutes and dollars are of
    probe_steps: int
    rules: Rules
    probes: tuple[Probe, ...] = ()
    stopped: str = ""

    @property
    def best(self) -> Probe | None:
        """Its best run."""
        return best_of(self.probes, self.rules)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        best = self.best
        plain: dict[str, Any] = _BOARD.dump_python(self, mode="json")
        return plain | {"best": None if best is None else best.number}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Scoreboard:
        """What `to_dict` made. Raises pydantic's ValidationError."""
        return _BOARD.validate_python({name: value for name, value in data.items() if name != "best"})


_BOARD: TypeAdapter[Scoreboard] = TypeAdapter(Scoreboard)
