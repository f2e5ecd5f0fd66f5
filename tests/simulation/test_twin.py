from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe
from rlkit.simulation.constants import Physics
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import setup_of, workload_of
from rlkit.simulation.simulate import simulate
from rlkit.simulation.twin import Factors, fit_twin

RUNS = Path(__file__).parents[2] / "runs"

# Another cluster than the one the built-in constants are of.
ELSEWHERE = replace(Physics(), row_s=0.45, row_mfu=0.22, iteration_s=4e-3, sequence_s=8e-6, load_s=1.5)


def published(name: str, *overrides: str) -> Recipe:
    return load_recipe(RUNS / "published" / f"{name}.yaml", ["train.steps=25", *overrides])


def logged(recipe: Recipe, physics: Physics = ELSEWHERE, seed: int = 7, longer: float = 1.0) -> pd.DataFrame:
    known = workload_of(recipe)
    workload = replace(known, mean_start=known.mean_start * longer, mean_end=known.mean_end * longer)
    return frame_of(simulate(setup_of(recipe, physics, workload), seed))


def test_a_run_elsewhere_is_reproduced() -> None:
    twin = fit_twin(logged(published("r1-dp2-tb16k")), published("r1-dp2-tb16k"))
    # Loads are tried at intervals: a sync's mean over a few of them jumps between two values, 3.9 and 6.3 s here.
    for metric, near in (("perf/step_s", 0.1), ("perf/fwd_bwd_s", 0.1), ("perf/weight_sync_s", 0.3)):
        simulated, real = twin.figures[metric]
        assert simulated == pytest.approx(real, rel=near), metric
    assert twin.error == pytest.approx(0, abs=0.1)


def test_a_run_by_the_built_in_constants_changes_nothing() -> None:
    recipe = published("r1-dp2-tb16k")
    assert fit_twin(logged(recipe, Physics(), seed=0), recipe).factors == Factors()


def test_longer_completions_are_noticed() -> None:
    recipe = published("r1-dp2-tb16k")
    assert fit_twin(logged(recipe, Physics(), longer=1.4), recipe).factors.lengths == pytest.approx(1.4, rel=0.08)


def test_a_change_is_predicted_by_the_run_before_it() -> None:
    before, after = published("r1-dp2-tb16k"), published("r1-dp2-tb16k", "transport.kind=push")
    twin = fit_twin(logged(before), before)
    predicted = simulate(twin.setup(after)).seconds / simulate(twin.setup(before)).seconds
    real = simulate(setup_of(after, ELSEWHERE)).seconds / simulate(setup_of(before, ELSEWHERE)).seconds
    assert predicted == pytest.approx(real, rel=0.05)
    assert real < 0.9


def test_the_part_of_a_run_that_was_logged_is_what_is_simulated() -> None:
    # Completions get shorter over a run: a log that ends early has the long ones.
    whole = published("r1-dp2-tb16k", "train.steps=250")
    early = frame_of(simulate(replace(setup_of(whole), stop_after=25)))
    assert fit_twin(early, whole).factors.lengths == pytest.approx(1.0, abs=0.05)


def test_a_log_without_times_is_refused() -> None:
    recipe = published("r1-dp2")
    frame = logged(recipe)[["sample/rollout_queue_size", "timestamp"]]
    with pytest.raises(BadInput, match=r"neither perf/step_s nor perf/fwd_bwd_s"):
        fit_twin(frame, recipe)


def test_figures_that_were_not_logged_leave_their_constants_alone() -> None:
    recipe = published("r1-dp2-tb16k")
    frame = logged(recipe)[["perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s"]]
    factors = fit_twin(frame, recipe).factors
    assert (factors.lengths, factors.loading) == (1.0, 1.0)
    assert factors.rows > 1.1
