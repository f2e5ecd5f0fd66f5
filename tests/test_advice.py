from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rlkit import advice
from rlkit.advice import advise
from rlkit.candidates import PAIRED, candidates, pairs
from rlkit.counsel import Counsel, Figures, Limits, Objective, Refused, score
from rlkit.recipe import Recipe, load_recipe, recipe_diff
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate
from rlkit.sizing import Situation

RUNS = Path(__file__).parents[1] / "runs"


def published(name: str, *overrides: str) -> Recipe:
    return load_recipe(RUNS / "published" / f"{name}.yaml", ["train.steps=20", *overrides])


# Fewer steps are enough to tell what helps from what does not.
advice.ADVISED_STEPS = 15


@cache
def counsel(
    name: str, objective: Objective = "time", learning: bool = False, overrides: tuple[str, ...] = ()
) -> Counsel:
    """Of twenty steps, for the published five hundred."""
    recipe = published(name, *overrides)
    frame = frame_of(simulate(setup_of(recipe)))
    return advise(frame, recipe, objective, learning=learning, steps=500, processes=1)


def test_small_rows_are_packed_first() -> None:
    found = counsel("r1-dp2")
    best = found.advice[0]
    assert "tiny-rows" in best.causes
    assert "train.token_budget 0 -> " in best.changes
    assert best.gain > 0.6
    assert best.predicted.wall_clock_min == pytest.approx(found.as_it_is.wall_clock_min * (1 - best.gain))
    assert best.predicted.usd == pytest.approx(20 * best.predicted.wall_clock_min / 60)
    assert any(effect.startswith("Memory: about") for effect in best.side_effects)
    assert found.twin.error == pytest.approx(0, abs=0.05)


def test_what_the_other_side_decides_is_not_proposed() -> None:
    # The trainer of the first run never waits: faster generation cannot help.
    touched = {field for one in counsel("r1-dp2").advice for field, _, _ in one.fields}
    assert not touched & {"serve.replicas", "rollout.max_inflight_tasks", "cap.policy"}


def for_less() -> Counsel:
    """For cost, with what is learned free to change, on a trainer's GPU of a third of the memory."""
    return counsel("r1-dp2-tb16k", "cost", True, ("hardware.trainer=l40sx2",))


def test_rows_that_do_not_fit_into_the_gpu_are_refused_with_the_estimate() -> None:
    refused = {one.overrides: one.why for one in for_less().refused}
    assert refused[("train.gradient_checkpointing=false",)].startswith("memory: about 74 of 48 GB")


def test_learning_is_only_changed_when_that_is_allowed() -> None:
    assert not any(one.learning for one in counsel("r1-dp2").advice)
    assert "rollout.weight_sync_steps 4 -> 8" in {one.changes for one in for_less().advice if one.learning}


def test_cost_gives_up_a_replica_that_is_not_needed() -> None:
    fewer = [one for one in for_less().advice if ("serve.replicas", 2, 1) in one.fields]
    assert fewer
    assert fewer[0].gain == pytest.approx(0.25, abs=0.05)
    assert fewer[0].predicted.usd is not None


def test_advice_as_json_holds_what_was_compared() -> None:
    plain = json.loads(json.dumps(counsel("r1-dp2").to_dict()))
    assert set(plain["twin"]["figures"]["perf/step_s"]) == set(counsel("r1-dp2").twin.figures["perf/step_s"])
    assert plain["advice"][0]["predicted"]["wall_clock_min"] < plain["as_it_is"]["wall_clock_min"]


def test_a_run_without_a_price_is_weighed_by_device_hours() -> None:
    here = Figures(6.0, 60.0, None, 4.0, None, None, None, None)
    assert here.cost == 4.0
    assert score(here, "cost", Limits()) == 4.0


def test_a_limit_that_is_exceeded_counts_against_a_change() -> None:
    here = Figures(6.0, 60.0, 20.0, 4.0, None, None, None, None)
    assert score(here, "cost", Limits(deadline_min=30)) == 40
    assert score(here, "time", Limits(budget_usd=10)) == 120
    assert score(here, "time", Limits(deadline_min=60, budget_usd=20)) == 60


def test_of_two_as_good_the_cheaper_is_first() -> None:
    base = counsel("r1-dp2").advice[0]
    dear = replace(base, slug="dear", gain=0.5, predicted=replace(base.predicted, usd=30.0))
    cheap = replace(base, slug="cheap", gain=0.49, predicted=replace(base.predicted, usd=10.0))
    less = replace(base, slug="less", gain=0.4, predicted=replace(base.predicted, usd=1.0))
    assert [one.slug for one in advice._ranked([dear, cheap, less], "time")] == ["cheap", "dear", "less"]


def test_trainer_and_generation_are_tried_together_where_neither_alone_pays() -> None:
    recipe = published("r1-dp2-tb16k")
    refused: list[Refused] = []
    situation = Situation(recipe, 150.0, 1200.0)
    alone = list(candidates(situation, 0.05, False, "time", refused))
    both = list(pairs({}, alone, recipe, refused))
    sides = [{change.slug for change, _, _ in alone if change.side == side} for side in ("trainer", "generation")]
    assert len(both) == min(PAIRED, len(sides[0])) * min(PAIRED, len(sides[1])) >= PAIRED
    for change, new, _ in both:
        fields = {name.partition(".")[0] for name, _, _ in recipe_diff(recipe, new)}
        assert "train" in fields
        assert fields & {"rollout", "serve"}
        assert not change.learning
