"""What to change in a recipe after its run: for each cause the change, what it would bring, and what else it does.

Every change that the recipe allows is simulated with the constants of this very run (`rlkit.simulation.twin`), beside
the recipe as it is. The ratio of the two, times what the run measured, is the prediction: what the simulator gets wrong
of both cancels. A change whose rows do not fit into the trainer's GPU is refused, by an estimate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from rlkit import machine
from rlkit.candidates import Candidate, candidates, pairs
from rlkit.counsel import Advice, Counsel, Figures, Limits, Objective, Refused, costs, measured_figures, score
from rlkit.diagnosis import Verdict, diagnose
from rlkit.errors import BadInput, RlkitError
from rlkit.pace import mean_step_s
from rlkit.process_pool import process_pool
from rlkit.recipe import Recipe, recipe_diff
from rlkit.settling import warmup_steps
from rlkit.signals import measure, settled_steps
from rlkit.simulation.frame import frame_of
from rlkit.simulation.setup import Setup
from rlkit.simulation.simulate import simulate
from rlkit.simulation.training_memory import MemoryEstimate
from rlkit.simulation.twin import Twin, fit_twin
from rlkit.sizing import situation

# Steps that each change is simulated for, its lengths changing as over the whole run.
ADVISED_STEPS = 60

# Below this nothing is worth a run: simulated steps of the same recipe differ by as much between seeds.
WORTHWHILE = 0.05

# Changes within this of the best are as good as it: the cheaper, or the less drastic, comes first.
AS_GOOD = 0.02

# A calibrated simulator this far from the run's step time is told to be unsure.
FAR_OFF = 0.15

# Rows of another size that train on fewer samples a step than this part of what the run did change what is learned.
# Full rows of the same size hold more or fewer, as the lengths of their samples are.
AS_MANY_SAMPLES = 0.97
BATCH_FIELDS = ("train.token_budget", "train.gradient_accumulation_steps")


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
    now = situation(recipe, signals)
    alone = [] if now is None else list(candidates(now, signals.wait_share, learning, objective, refused))
    whole = steps or recipe.train.steps
    jobs = [(recipe, twin, whole), *((new, twin, whole) for _, new, _ in alone)]
    simulated = _simulate_all(jobs, processes)
    base = simulated[0]
    found = _advices(recipe, alone, simulated[1:], base, here, verdict, objective, limits, refused)
    if not any(one.gain >= WORTHWHILE for one in found):
        both = list(pairs({one.overrides: one.gain for one in found}, alone, recipe, refused))
        simulated = _simulate_all([(new, twin, whole) for _, new, _ in both], processes)
        found += _advices(recipe, both, simulated, base, here, verdict, objective, limits, refused)
    return Counsel(
        objective,
        here,
        twin,
        tuple(_ranked(found, objective)),
        tuple(refused),
        tuple(_unanswered(verdict, found)),
        tuple(_notes(twin, recipe)),
    )


@dataclass(frozen=True)
class _Simulated:
    step_s: float
    staleness: float
    dropped: float
    samples: float
    wait_share: float


def _advices(
    recipe: Recipe,
    tried: Sequence[Candidate],
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
    for (change, new, memory), one in zip(tried, simulated, strict=True):
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
            *costs(new, here.wall_clock_min * ratio),
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


def _simulate_all(jobs: Sequence[tuple[Recipe, Twin, int]], processes: int | None) -> list[_Simulated | str]:
    workers = min(processes or machine.cores(), len(jobs))
    if workers <= 1:
        return [_simulate(job) for job in jobs]
    with process_pool(workers) as pool:
        return list(pool.map(_simulate, jobs))


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
