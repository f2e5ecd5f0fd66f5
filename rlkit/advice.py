"""What to change in a recipe after its run: for each cause the change, what it would bring, and what else it does.

Every change that the recipe allows is simulated with the constants of this very run (`rlkit.simulation.twin`), beside
the recipe as it is. The ratio of the two, times what the run measured, is the prediction: what the simulator gets wrong
of both cancels. A change whose rows do not fit into the trainer's GPU is refused, by an estimate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any, Literal

import pandas as pd

from rlkit import machine
from rlkit.diagnosis import Verdict, diagnose
from rlkit.errors import BadInput, RlkitError
from rlkit.pace import mean_step_s, run_minutes
from rlkit.recipe import Recipe, recipe_diff
from rlkit.remedies import Change, Situation, changed, remedies, together
from rlkit.signals import Signals, measure, settled_steps, warmup_steps
from rlkit.simulation.frame import frame_of
from rlkit.simulation.planning import NEVER_WAITS
from rlkit.simulation.setup import Setup
from rlkit.simulation.simulate import simulate
from rlkit.simulation.training_memory import MemoryEstimate, training_memory
from rlkit.simulation.twin import Twin, fit_twin

Objective = Literal["time", "cost"]

# Steps that each change is simulated for, its lengths changing as over the whole run.
ADVISED_STEPS = 60

# Below this nothing is worth a run: simulated steps of the same recipe differ by as much between seeds.
WORTHWHILE = 0.05

# Changes within this of the best are as good as it: the cheaper, or the less drastic, comes first.
AS_GOOD = 0.02

# A trainer that waits for longer than this gains nothing from computing faster.
STARVED = 0.25

# A calibrated simulator this far from the run's step time is told to be unsure.
FAR_OFF = 0.15

# Rows of another size that train on fewer samples a step than this part of what the run did change what is learned.
# Full rows of the same size hold more or fewer, as the lengths of their samples are.
AS_MANY_SAMPLES = 0.97
BATCH_FIELDS = ("train.token_budget", "train.gradient_accumulation_steps")

# Of each side, the changes that are also tried together when none alone is worthwhile.
PAIRED = 2


@dataclass(frozen=True)
class Limits:
    """What the whole run may take and cost at most; None: no limit."""

    deadline_min: float | None = None
    budget_usd: float | None = None

    def excess(self, minutes: float, usd: float | None) -> float:
        """1 within the limits, and as many times more as they are exceeded."""
        late = minutes / self.deadline_min if self.deadline_min else 1.0
        dear = usd / self.budget_usd if self.budget_usd and usd is not None else 1.0
        return max(1.0, late) * max(1.0, dear)


@dataclass(frozen=True)
class Figures:
    """A recipe's run: seconds of a mean step, minutes of all steps, their price where an hour's is known."""

    step_s: float
    wall_clock_min: float
    usd: float | None
    device_hours: float  # of the price, where none is known: devices of trainer and replicas x hours
    staleness: float | None
    dropped_per_trained: float | None
    samples_per_step: float | None
    wait_share: float | None

    @property
    def cost(self) -> float:
        """USD, or device hours without a price."""
        return self.device_hours if self.usd is None else self.usd


@dataclass(frozen=True)
class Advice:
    """One change of the recipe, what it is predicted to bring, and what else it does."""

    slug: str
    causes: tuple[str, ...]  # those of the verdict that it answers; empty: nothing the verdict names
    overrides: tuple[str, ...]  # as --set takes them
    fields: tuple[tuple[str, Any, Any], ...]  # name, before, after; the price of an hour with them
    predicted: Figures
    gain: float  # of minutes or cost, whichever is the objective: 0.2 is a fifth less
    side_effects: tuple[str, ...]
    learning: bool

    @property
    def changes(self) -> str:
        """`train.token_budget 0 -> 16384, ...`, without the price."""
        told = [f"{name} {old} -> {new}" for name, old, new in self.fields if name != "hardware.usd_per_hour"]
        return ", ".join(told)


@dataclass(frozen=True)
class Refused:
    """A change that is not advised, and why."""

    overrides: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Counsel:
    """All advice for one run, the best first; `as_it_is` is measured, the rest predicted from it."""

    objective: Objective
    as_it_is: Figures
    twin: Twin
    advice: tuple[Advice, ...]
    refused: tuple[Refused, ...]
    unanswered: tuple[str, ...]  # what to do about causes that no field of the recipe answers
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"twin": self.twin.to_dict()}


def advise(
    frame: pd.DataFrame,
    recipe: Recipe,
    objective: Objective = "time",
    limits: Limits | None = None,
    learning: bool = False,
    steps: int | None = None,
    verdict: Verdict | None = None,
    processes: int | None = None,
) -> Counsel:
    """What to change after the run in `frame`. Raises BadInput for one that cannot be simulated or has no times.

    `steps` are those of the whole run, when the one in `frame` was a short one. Changes are simulated on this machine's
    cores, or one after the other with `processes=1`.
    """
    limits = limits or Limits()
    verdict = verdict or diagnose(frame, recipe)
    twin = fit_twin(frame, recipe)
    settled = settled_steps(frame, recipe)
    signals = measure(settled, recipe)
    here = measured_figures(frame, recipe, steps)
    refused: list[Refused] = []
    candidates = list(_candidates(_situation(recipe, twin, signals), signals, learning, objective, refused))
    whole = steps or recipe.train.steps
    jobs = [(recipe, twin, whole), *((new, twin, whole) for _, new, _ in candidates)]
    simulated = _simulate_all(jobs, processes)
    base = simulated[0]
    found = _advices(recipe, candidates, simulated[1:], base, here, verdict, objective, limits, refused)
    if not any(one.gain >= WORTHWHILE for one in found):
        pairs = list(_pairs(found, candidates, recipe, refused))
        simulated = _simulate_all([(new, twin, whole) for _, new, _ in pairs], processes)
        found += _advices(recipe, pairs, simulated, base, here, verdict, objective, limits, refused)
    return Counsel(
        objective,
        here,
        twin,
        tuple(_ranked(found, objective)),
        tuple(refused),
        tuple(_unanswered(verdict, found)),
        tuple(_notes(twin, recipe)),
    )


Candidate = tuple[Change, Recipe, MemoryEstimate | None]  # the estimate where the change needs more, or less


@dataclass(frozen=True)
class _Simulated:
    step_s: float
    staleness: float
    dropped: float
    samples: float
    wait_share: float


def _candidates(
    now: Situation, signals: Signals, learning: bool, objective: Objective, refused: list[Refused]
) -> Iterator[Candidate]:
    """The changes that could bring something, with their recipes; those that do not fit are told to `refused`."""
    wait = signals.wait_share
    seen: set[tuple[str, ...]] = set()
    for change in remedies(now, learning, objective == "cost"):
        # On shared cores each side has what the other one leaves, and either may gain by either's.
        if change.overrides in seen or (not now.shares_cores and _is_vain(change, wait)):
            continue
        seen.add(change.overrides)
        tried = _tried(now.recipe, change, refused)
        if tried is not None:
            yield tried


def _tried(recipe: Recipe, change: Change, refused: list[Refused]) -> Candidate | None:
    try:
        new = changed(recipe, change)
    except BadInput as error:
        refused.append(Refused(change.overrides, str(error)))
        return None
    memory = training_memory(new)
    before = training_memory(recipe)
    # A recipe that runs fits, whatever the estimate says.
    if memory is not None and before is not None and not memory.fits and memory.needed > before.needed:
        refused.append(Refused(change.overrides, f"memory: {memory}"))
        return None
    return change, new, None if before is not None and memory == before else memory


def _is_vain(change: Change, wait: float | None) -> bool:
    """Whether the other side's speed alone decides: the trainer's when it never waits, generation's when it starves."""
    if wait is None or change.side == "sync":
        return False
    if change.side == "generation":
        return wait < NEVER_WAITS
    if change.side == "trainer":
        return wait > STARVED
    return (wait > STARVED) == ("idle-replicas" in change.causes)


def _pairs(
    found: Sequence[Advice], candidates: Sequence[Candidate], recipe: Recipe, refused: list[Refused]
) -> Iterator[Candidate]:
    """A faster trainer and faster generation at once: between equals neither alone brings anything."""
    gains = {one.overrides: one.gain for one in found}
    sides: dict[str, list[Change]] = {"trainer": [], "generation": []}
    for change, _, _ in candidates:
        if change.side in sides:
            sides[change.side].append(change)
    best = {
        side: sorted(changes, key=lambda change: -gains.get(change.overrides, 0.0))[:PAIRED]
        for side, changes in sides.items()
    }
    for first in best["trainer"]:
        for second in best["generation"]:
            tried = _tried(recipe, together(first, second), refused)
            if tried is not None:
                yield tried


def _advices(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    simulated: Sequence[_Simulated | str],
    base: _Simulated | str,
    here: Figures,
    verdict: Verdict,
    objective: Objective,
    limits: Limits,
    refused: list[Refused],
) -> list[Advice]:
    if isinstance(base, str):
        raise BadInput(f"the run cannot be simulated: {base}")
    named = {cause.name for cause in verdict.causes}
    found = []
    for (change, new, memory), one in zip(candidates, simulated, strict=True):
        fields = recipe_diff(recipe, new)
        if isinstance(one, str):
            refused.append(Refused(change.overrides, one))
            continue
        if one.samples < AS_MANY_SAMPLES * base.samples and any(field in BATCH_FIELDS for field, _, _ in fields):
            refused.append(Refused(change.overrides, f"fewer samples a step: {base.samples:.0f} -> {one.samples:.0f}"))
            continue
        ratio = one.step_s / base.step_s
        predicted = Figures(
            here.step_s * ratio,
            here.wall_clock_min * ratio,
            *_costs(new, here.wall_clock_min * ratio),
            staleness=one.staleness,
            dropped_per_trained=one.dropped,
            samples_per_step=one.samples,
            wait_share=one.wait_share,
        )
        found.append(
            Advice(
                change.slug,
                tuple(name for name in change.causes if name in named),
                change.overrides,
                tuple(fields),
                predicted,
                1 - score(predicted, objective, limits) / score(here, objective, limits),
                (*change.side_effects, *_effects(base, one, memory)),
                change.learning,
            )
        )
    return found


def score(figures: Figures, objective: Objective, limits: Limits) -> float:
    """What is to be small: minutes or cost, times what exceeds a limit."""
    of = figures.wall_clock_min if objective == "time" else figures.cost
    return of * limits.excess(figures.wall_clock_min, figures.usd)


def _effects(base: _Simulated, new: _Simulated, memory: MemoryEstimate | None) -> Iterator[str]:
    if abs(new.staleness - base.staleness) >= 0.1:
        yield f"Staleness {base.staleness:.1f} -> {new.staleness:.1f} versions."
    if abs(new.dropped - base.dropped) >= 0.02:
        yield f"Thrown away as stale, of 100 trained on: {100 * base.dropped:.0f} -> {100 * new.dropped:.0f}."
    if abs(new.samples / base.samples - 1) >= 0.02:
        yield f"Samples of a step {base.samples:.0f} -> {new.samples:.0f}."
    if memory is not None:
        yield f"Memory: {memory}."


def _ranked(found: list[Advice], objective: Objective) -> list[Advice]:
    """The most gain first; of those about as good the cheaper, or faster, then the one that changes least."""

    def second(one: Advice) -> float:
        return one.predicted.cost if objective == "time" else one.predicted.wall_clock_min

    left = sorted(found, key=lambda one: -one.gain)
    ranked: list[Advice] = []
    while left:
        near = [one for one in left if one.gain >= left[0].gain - AS_GOOD]
        best = min(near, key=lambda one: (round(second(one), 3), len(one.overrides), -one.gain))
        ranked.append(best)
        left.remove(best)
    return ranked


def _unanswered(verdict: Verdict, found: Sequence[Advice]) -> Iterator[str]:
    answered = {name for one in found for name in one.causes}
    for cause in verdict.causes:
        if cause.name not in answered:
            yield f"{cause.text}: {cause.next_action}"


def _notes(twin: Twin, recipe: Recipe) -> Iterator[str]:
    error = twin.error
    if error is None:
        yield "The run logged no perf/step_s: its step is the sum of the phases it did log."
    elif abs(error) > FAR_OFF:
        yield f"The calibrated simulator's step is {error:+.0%} from the run's: take what it predicts as a direction."
    yield from twin.extrapolated


def _situation(recipe: Recipe, twin: Twin, signals: Signals) -> Situation:
    lengths = twin.setup(recipe).lengths
    assumed = lengths.prompt_tokens + (lengths.mean_start + lengths.mean_end) / 2
    tokens = signals.sample_tokens or assumed
    samples = signals.samples_per_step or float(recipe.samples_per_step or 0)
    if not samples:
        budget = recipe.train.token_budget or recipe.serve.max_model_len
        samples = budget * recipe.train.gradient_accumulation_steps * recipe.train.processes / tokens
    return Situation(recipe, samples, tokens)


def measured_figures(frame: pd.DataFrame, recipe: Recipe, steps: int | None = None) -> Figures:
    """What the run in `frame` says of `steps` steps (None: the recipe's). Raises BadInput when no step is timed."""
    step_s, minutes = mean_step_s(frame, recipe), run_minutes(frame, recipe, steps or recipe.train.steps)
    if step_s is None or minutes is None:
        raise BadInput("the run has no timed step after its warm-up: nothing to predict by")
    signals = measure(settled_steps(frame, recipe), recipe)
    return Figures(
        step_s,
        minutes,
        *_costs(recipe, minutes),
        staleness=signals.staleness_mean,
        dropped_per_trained=signals.dropped_per_trained,
        samples_per_step=signals.samples_per_step,
        wait_share=signals.wait_share,
    )


def _costs(recipe: Recipe, minutes: float) -> tuple[float | None, float]:
    """USD, and device hours."""
    rate = recipe.hardware.usd_per_hour
    serve = recipe.serve
    devices = recipe.train.processes + serve.replicas * serve.data_parallel_size * serve.tensor_parallel_size
    return None if rate is None else rate * minutes / 60, devices * minutes / 60


def _simulate_all(jobs: Sequence[tuple[Recipe, Twin, int]], processes: int | None) -> list[_Simulated | str]:
    workers = min(processes or machine.cores(), len(jobs))
    if workers <= 1:
        return [_simulate(job) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            return list(pool.map(_simulate, jobs))
        except BaseException:  # Ctrl-C, too: what has not begun does not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _simulate(job: tuple[Recipe, Twin, int]) -> _Simulated | str:
    """A recipe by the twin's constants; why it cannot be simulated, when it cannot."""
    recipe, twin, steps = job
    try:
        setup: Setup = twin.setup(recipe)
        run = simulate(replace(setup, steps=max(min(steps, ADVISED_STEPS), 2 * warmup_steps(recipe))))
    except RlkitError as error:
        return str(error)
    frame = frame_of(run)
    step_s = mean_step_s(frame, recipe)
    rows = [step.metrics for step in run.steps[warmup_steps(recipe) :]]

    def mean(name: str) -> float:
        return statistics.fmean([row[name] for row in rows if name in row] or [0.0])

    whole = step_s if step_s is not None else run.seconds / len(run.steps)
    return _Simulated(
        whole,
        mean("sample/staleness_mean"),
        run.dropped / run.trained_samples,
        mean("batch/samples_per_step"),
        mean("perf/rollout_wait_s") / whole,
    )
