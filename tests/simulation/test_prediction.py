from pathlib import Path

import pytest

from rlkit.errors import BadInput
from rlkit.recipe import load_recipe
from rlkit.simulation.prediction import predict
from rlkit.simulation.recipes import translate

RUNS = Path(__file__).parents[2] / "runs"


def test_a_prediction_has_time_cost_and_verdict_with_a_spread() -> None:
    recipe = load_recipe(RUNS / "published" / "r1-dp3-inflight384.yaml", ["train.steps=20"])
    prediction = predict(recipe, seeds=2, processes=1)
    assert (prediction.steps, prediction.seeds, len(prediction.bounds)) == (20, 2, 2)
    for spread in (prediction.step_s, prediction.wall_clock_min, prediction.staleness):
        assert spread.low <= spread.mean <= spread.high
    assert prediction.usd is not None
    assert prediction.usd.mean == pytest.approx(prediction.wall_clock_min.mean / 60 * 25)
    assert prediction.extrapolated == ()
    assert prediction.to_dict()["verdict"]["bound"] == prediction.bounds[0]


def test_the_only_step_of_a_run_takes_as_long_as_the_run() -> None:
    """The first step of a trainer logs no perf/step_s."""
    one = predict(load_recipe(RUNS / "published" / "r1-dp2.yaml", ["train.steps=1"]), seeds=1, processes=1)
    assert one.step_s.mean == pytest.approx(one.wall_clock_min.mean * 60)
    assert one.step_s.mean > 10


def test_other_hardware_and_models_are_said_to_be_extrapolated() -> None:
    chase = RUNS / "published" / "r1-dp2.yaml"
    assert translate(load_recipe(chase)).extrapolated == ()
    [note] = translate(load_recipe(chase, ["hardware.replica=a100"])).extrapolated
    assert note == "hardware.replica a100: extrapolated from its data sheet, the constants are of an H200."
    faster = translate(load_recipe(chase, ["hardware.trainer=b200"])).setup.trainer
    assert faster.row_token_s < translate(load_recipe(chase)).setup.trainer.row_token_s


def test_a_cache_smaller_than_a_sequence_is_refused() -> None:
    recipe = load_recipe(RUNS / "adaptive-cap" / "kv8g-main.yaml", ["serve.kv_cache_gib=0.1"])
    with pytest.raises(BadInput, match="the KV cache holds"):
        translate(recipe)
