"""Verdicts beside what interventions show: accuracy, calibration, confusion matrix.

Scenarios are dealt to two halves, a round of all kinds to each in turn: thresholds may be looked at on the first,
figures are reported of the second. A label is the mean of a scenario's gains over its seeds, so that it is one about
the recipe.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlkit import machine
from rlkit.diagnosis import Verdict, diagnose
from rlkit.errors import BadInput
from rlkit.evaluation.interventions import LEAST_GAIN, Labelled, label
from rlkit.evaluation.scenarios import KINDS, Scenario
from rlkit.evaluation.store import LabelStore
from rlkit.process_pool import process_pool

SEEDS = 3

# The verdict's names for what an intervention makes faster. A tenth off the recomputed forward is a part of the row's
# tokens, and samples that are dropped are a symptom: either answer to a label that has two is right.
ANSWERS: dict[str, frozenset[str]] = {
    "rows": frozenset({"tiny-rows"}),
    "tokens": frozenset({"compute", "recompute"}),
    "replicas": frozenset({"replicas"}),
    "in-flight": frozenset({"client-limit"}),
    "connections": frozenset({"connections"}),
    "cache": frozenset({"over-admission"}),
    "over-admission": frozenset({"over-admission", "stale", "queue"}),
    "slow-replica": frozenset({"slow-replica"}),
    "sync": frozenset({"sync"}),
    "scoring": frozenset({"scoring"}),
}
# Gains that are nearer to each other than this cannot be told apart by the seeds' runs: half a percent of throughput.
SAME_GAIN = 0.005

NO_SIDE = ("balanced", "undetermined")
HALVES = ("tuning", "report")


@dataclass(frozen=True)
class Judged:
    """One run's label and verdict. `gain` is the largest; `side` is `none` where it is not over 2 %."""

    scenario: str
    kind: str
    seed: int
    half: str  # tuning, report
    gain: float
    side: str
    cause: str
    bound: str
    named: str  # the verdict's first cause
    probability: float
    near_sides: frozenset[str] = frozenset()  # whose gain is the largest but for SAME_GAIN; `none` where that is 2 %
    near_causes: frozenset[str] = frozenset()
    shown_again: bool | None = None  # whether this run's own interventions name the side that its other seeds' do

    @property
    def side_right(self) -> bool:
        """Whether the side is; without one to find, whether none was named."""
        return self.bound in NO_SIDE if self.side == "none" else self.bound == self.side

    @property
    def cause_right(self) -> bool:
        """Whether the first cause is one of the label's."""
        return self.named in ANSWERS.get(self.cause, frozenset())

    @property
    def side_as_good(self) -> bool:
        """Whether no experiment can tell the side from a right one."""
        said = "none" if self.bound in NO_SIDE else self.bound
        return self.side_right or said in self.near_sides

    @property
    def cause_as_good(self) -> bool:
        """The same of the first cause."""
        return self.cause_right or any(self.named in ANSWERS.get(cause, frozenset()) for cause in self.near_causes)


@dataclass(frozen=True)
class Score:
    """Of one half, or of both. Fractions, None where there is nothing to count; `calibration` by what was claimed.

    `..._as_good` also counts sides and causes whose gain is within SAME_GAIN of the largest. `shown_again` is how
    often experiments on one run show the side that those on the recipe's other seeds do: no log can tell more.
    """

    runs: int
    bound_runs: int
    side_right: float | None
    side_as_good: float | None
    shown_again: float | None
    cause_right: float | None
    cause_as_good: float | None
    free_runs: int
    free_right: float | None
    calibration: dict[str, tuple[int, float]]
    confusion: dict[str, dict[str, int]]
    causes: dict[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def evaluate(
    drawn: Sequence[Scenario],
    store: LabelStore,
    seeds: int = SEEDS,
    processes: int | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> list[Judged]:
    """Simulate the scenarios with each of `seeds` seeds and every intervention, and diagnose each run.

    What `store` has is not simulated again, and what is simulated is in it at once: an evaluation that was interrupted
    goes on. `on_run` gets how many of how many runs are there.
    """
    problem = machine.unwritable(store.folder)
    if problem is not None:
        raise BadInput(f"{store.folder}: {problem}; choose another --store")
    jobs = [(scenario, seed, store) for scenario in drawn for seed in range(seeds)]
    missing = [job for job in jobs if store.get(job[0], job[1]) is None]
    if missing:
        with process_pool(processes or machine.cores()) as pool:
            for number, _ in enumerate(pool.map(_simulate, missing), len(jobs) - len(missing) + 1):
                if on_run is not None:
                    on_run(number, len(jobs))
    return judge_stored(drawn, store, seeds)


def judge_stored(drawn: Sequence[Scenario], store: LabelStore, seeds: int = SEEDS) -> list[Judged]:
    """Diagnose the runs of those scenarios that are in the store with all their seeds."""
    judged: list[Judged] = []
    for scenario in drawn:
        runs = [run for seed in range(seeds) if (run := store.get(scenario, seed)) is not None]
        if len(runs) == seeds:
            judged += judge_runs(runs, half_of(scenario))
    return judged


def half_of(scenario: Scenario) -> str:
    """Which half a scenario is of, whatever is drawn beside it; both have every kind."""
    return HALVES[scenario.number // len(KINDS) % 2]


def _simulate(job: tuple[Scenario, int, LabelStore]) -> None:
    scenario, seed, store = job
    store.put(label(scenario, seed))


def judge_runs(runs: Sequence[Labelled], half: str) -> list[Judged]:
    """The runs of one scenario: one label, a verdict each."""
    sides = _means([run.sides for run in runs])
    side = _best(sides)
    cause = side
    of_side = [run.causes for run in runs if _best(run.sides) == side]
    causes = _means(of_side)
    if causes:
        cause = _best(causes)
    near_causes = _near(causes, max(causes.values(), default=0.0)) | {cause}
    if runs[0].scenario.lacks_connections:
        names = {"in-flight": "connections"}
        cause, near_causes = names.get(cause, cause), frozenset(names.get(name, name) for name in near_causes)
    near_sides = _near(sides, max(LEAST_GAIN, sides[side]))
    if sides[side] <= LEAST_GAIN + SAME_GAIN:
        near_sides |= {"none"}
    # A side that is as good has a cause of its own, which nobody has tried; sync and scoring are their own.
    near_causes |= near_sides & {"sync", "scoring"}
    bound = side if sides[side] > LEAST_GAIN else "none"
    judged = []
    for run in runs:
        verdict = diagnose(run.frame, run.scenario.recipe)
        judged.append(
            Judged(
                scenario=run.scenario.name,
                kind=run.scenario.kind,
                seed=run.seed,
                half=half,
                gain=sides[side],
                side=bound,
                cause=cause,
                bound=verdict.bound,
                named=_first(verdict),
                probability=verdict.probability,
                near_sides=near_sides,
                near_causes=near_causes,
                shown_again=_shown_again(run, runs),
            )
        )
    return judged


def score(judged: Sequence[Judged]) -> Score:
    """Count the right ones."""
    bound = [run for run in judged if run.side != "none"]
    free = [run for run in judged if run.side == "none"]
    claimed: dict[str, list[bool]] = {}
    for run in judged:
        if run.bound != "undetermined":  # `balanced` is a claim, too
            claimed.setdefault(f"{run.probability:.1f}", []).append(run.side_right)
    right_sides = [run for run in bound if run.side_right]
    return Score(
        runs=len(judged),
        bound_runs=len(bound),
        side_right=_fraction([run.side_right for run in bound]),
        side_as_good=_fraction([run.side_as_good for run in bound]),
        shown_again=_fraction([run.shown_again for run in bound if run.shown_again is not None]),
        cause_right=_fraction([run.cause_right and run.side_right for run in bound]),
        cause_as_good=_fraction([run.cause_as_good and run.side_as_good for run in bound]),
        free_runs=len(free),
        free_right=_fraction([run.side_right for run in free]),
        calibration={key: (len(hits), _fraction(hits) or 0.0) for key, hits in sorted(claimed.items(), reverse=True)},
        confusion=_table([(run.side, run.bound) for run in judged]),
        causes=_table([(run.cause, run.named) for run in right_sides]),
    )


def _shown_again(run: Labelled, runs: Sequence[Labelled]) -> bool | None:
    others = [other.sides for other in runs if other is not run]
    return _best(run.sides) == _best(_means(others)) if others else None


def _best(gains: dict[str, float]) -> str:
    return max(gains, key=lambda name: gains[name])


def _first(verdict: Verdict) -> str:
    return verdict.causes[0].name if verdict.causes else ""


def _near(gains: dict[str, float], most: float) -> frozenset[str]:
    return frozenset(name for name, gain in gains.items() if gain >= most - SAME_GAIN)


def _means(gains: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in gains) for name in gains[0]} if gains else {}


def _fraction(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def _table(pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    counted = Counter(pairs)
    return {
        true: {said: counted[true, said] for said in sorted({said for _, said in pairs}) if counted[true, said]}
        for true in sorted({true for true, _ in pairs})
    }
