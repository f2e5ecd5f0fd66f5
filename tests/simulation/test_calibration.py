from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import recipe, recorded

from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe
from rlkit.simulation.calibration import LoggedRun, calibrate, load_constants
from rlkit.simulation.constants import TOY, TWO_CORES
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import machine_of, setup_of
from rlkit.simulation.simulate import simulate

RUNS = Path(__file__).parents[2] / "runs"
# A machine twice as slow as the one the built-in constants are of, in everything that is calibrated.
OTHER = replace(TWO_CORES, iteration_s=0.018, sequence_s=0.5e-3, row_s=0.022, row_mfu=0.05, score_s=0.014, load_s=0.07)


def toy(*overrides: str) -> Recipe:
    return load_recipe(RUNS / "local.yaml", ["train.steps=12", "cap.policy=none", *overrides])


def logged(name: str, recipe: Recipe) -> LoggedRun:
    return LoggedRun(name, frame_of(simulate(setup_of(recipe, OTHER))), recipe)


def test_the_constants_of_a_machine_come_back_from_its_logs() -> None:
    runs = [
        logged("many in flight", toy()),
        logged("few in flight, short rows", toy("rollout.max_inflight_tasks=16", "train.token_budget=150")),
    ]
    found = calibrate(runs)
    length = 400
    rows = [physics.row_s + machine_of(toy()).row_token_s(physics) * length for physics in (found.physics, OTHER)]
    assert rows[0] == pytest.approx(rows[1], rel=0.1)
    iterations = [physics.iteration_s + physics.sequence_s * 20 for physics in (found.physics, OTHER)]
    assert iterations[0] == pytest.approx(iterations[1], rel=0.15)
    assert found.physics.score_s == pytest.approx(0.014, rel=0.1)
    assert found.physics.load_s == pytest.approx(0.07, abs=0.002)
    for figures in found.residuals.values():
        simulated, real = figures["perf/step_s"]
        assert simulated == pytest.approx(real, rel=0.1)


def test_a_recipe_that_was_held_out_is_predicted() -> None:
    found = calibrate([logged("seen", toy())])
    held_out = toy("train.token_budget=1024", "train.gradient_accumulation_steps=1", "rollout.max_inflight_tasks=16")
    real, predicted = (
        simulate(setup_of(held_out, *constants)) for constants in ((OTHER,), (found.physics, found.workload))
    )
    assert predicted.seconds == pytest.approx(real.seconds, rel=0.25)


def test_shared_answers_and_cores_are_not_taken_for_a_faster_trainer() -> None:
    # A trainer-bound run, whose servers idle, and one whose servers work all the time: the same row takes longer there.
    seen = toy("train.token_budget=512")
    found = calibrate([logged("seen", seen)])
    assert found.workload.folds_prompts
    assert found.workload.shared_completion == pytest.approx(TOY.shared_completion, abs=0.1)
    alone = toy("train.token_budget=0", "train.gradient_accumulation_steps=64", "train.gradient_checkpointing=true")
    real, predicted = (
        simulate(setup_of(alone, *constants)) for constants in ((OTHER,), (found.physics, found.workload))
    )
    assert predicted.seconds == pytest.approx(real.seconds, rel=0.15)


def test_constants_are_kept_in_a_file(tmp_path: Path) -> None:
    found = calibrate([logged("seen", toy())])
    found.save(tmp_path / "constants.json")
    assert load_constants(tmp_path / "constants.json") == (found.physics, found.workload)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(BadInput, match="not a file of constants"):
        load_constants(tmp_path / "broken.json")


def test_a_run_that_says_too_little_is_refused() -> None:
    frame = recorded("trainer-bound-run").drop(columns="perf/fwd_bwd_s")
    with pytest.raises(BadInput, match="no perf/fwd_bwd_s"):
        calibrate([LoggedRun("real", frame, recipe())])
    with pytest.raises(BadInput, match="at least one run"):
        calibrate([])
