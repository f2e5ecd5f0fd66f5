from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import BadInput
from rlkit.recipe import load_recipe
from rlkit.simulation import planning
from rlkit.simulation.planning import Point, _front, _shapes

CHASE = load_recipe(Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml")


def point(minutes: float, usd: float | None, replicas: int = 1) -> Point:
    return Point((), minutes, usd, None, 1.0, 1.0, 0.0, 0.0, "trainer", replicas, 128)


def test_only_what_nothing_else_beats_is_on_the_front() -> None:
    points = [point(50, 20), point(60, 15), point(55, 25), point(60, 16), point(90, 15)]
    assert [(one.wall_clock_min, one.usd) for one in _front(points)] == [(50, 20), (60, 15)]


def test_without_prices_replicas_are_the_cost() -> None:
    points = [point(50, None, 3), point(52, None, 1), point(51, None, 3)]
    assert [one.wall_clock_min for one in _front(points)] == [50, 52]


def test_what_changes_learning_is_left_alone_unless_asked_for() -> None:
    changes = {change.partition("=")[0] for shape in _shapes(CHASE, ()) for change in shape}
    assert "rollout.weight_sync_steps" not in changes
    assert "rollout.max_staleness" not in changes
    asked = [change for shape in _shapes(CHASE, (4, 8)) for change in shape]
    assert set(asked) >= {"rollout.weight_sync_steps=8"}
    assert "rollout.weight_sync_steps=4" not in asked


def test_a_plan_within_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("IN_FLIGHT_PER_REPLICA", (128,)), ("MORE_REPLICAS", 0)):
        monkeypatch.setattr(planning, name, value)
    recipe = CHASE.with_overrides(
        ["train.steps=12", "train.gradient_checkpointing=false", "transport.kind=push", "cap.policy=rlkit"]
    )
    found = planning.plan(recipe, deadline_min=2.0, processes=1)
    assert found.as_it_is.wall_clock_min > 2.0
    assert found.front
    for one in found.front:
        assert one.wall_clock_min <= 2.0
        assert "train.token_budget=16384" in one.changes
    assert found.to_dict()["as_it_is"]["bound"] == "trainer"
    assert found.nearest is None
    # Where nothing keeps to what was asked, what misses it by the least is told.
    none = planning.plan(recipe, budget_usd=0.01, deadline_min=2.0, processes=1)
    assert none.front == ()
    assert none.nearest is not None
    assert none.nearest.usd is not None
    assert none.nearest.usd < (none.as_it_is.usd or 0.0)


def test_a_budget_needs_a_price() -> None:
    with pytest.raises(BadInput, match=r"hardware\.usd_per_hour: not set"):
        planning.plan(CHASE.with_overrides(["hardware.usd_per_hour=null"]), budget_usd=20)
