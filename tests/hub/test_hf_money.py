"""Prices, costs, and when money or time end a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub.hub_server import HARDWARE
from huggingface_hub import JobHardwareInfo, JobInfo

from rlkit.engines.hf_money import hourly_prices, job_cost, price_of, spent, spent_before, stop_reason
from rlkit.engines.hf_predict import predicted_step_s
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

PUBLISHED = Path(__file__).parents[2] / "runs" / "published"
PRICES = {"h200": 5.0, "h200x2": 10.0}


def job(flavor: str, seconds: int | None, launch: str = "a", stage: str = "RUNNING") -> JobInfo:
    return JobInfo(
        id="1",
        flavor=flavor,
        status={"stage": stage},
        labels={"launch": launch},
        owner={"id": "0", "name": "me", "type": "user"},
        durations={"runningSecs": seconds},
    )


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(PUBLISHED / "r1-dp2.yaml")


def test_prices_an_hour_from_the_hubs_list() -> None:
    prices = hourly_prices([JobHardwareInfo(**item) for item in HARDWARE])
    assert prices["h200x2"] == pytest.approx(10.0)


def test_unknown_unit_is_refused() -> None:
    with pytest.raises(BadInput, match="fortnight"):
        hourly_prices([JobHardwareInfo(**{**HARDWARE[0], "unitLabel": "fortnight"})])


@pytest.mark.parametrize("name", ["r1-dp2", "r1-dp3-inflight384"])
def test_published_set_ups_cost_what_they_say(name: str) -> None:
    recipe = load_recipe(PUBLISHED / f"{name}.yaml")
    assert price_of(recipe, PRICES, None).usd_per_hour == recipe.hardware.usd_per_hour


def test_price_of_the_run_and_the_most_it_can_be(recipe: Recipe) -> None:
    price = price_of(recipe, PRICES, step_s=22.9)
    assert price.usd == pytest.approx(20 * 500 * 22.9 / 3600)
    assert price.most_usd == 20 * 24
    assert price_of(recipe.with_overrides(["hardware.budget_usd=7"]), PRICES, None).most_usd == 7
    assert str(price) == "$20.00 an hour, about $63.61 for the run (3.2 h predicted), at most $480.00"
    short = price_of(recipe.with_overrides(["train.steps=15"]), PRICES, step_s=22.9)
    assert "about $1.91 for the run (6 min predicted)" in str(short)


def test_unknown_flavor_names_those_there_are(recipe: Recipe) -> None:
    with pytest.raises(BadInput, match=r"hardware.replica: 'h9000'.*h200, h200x2"):
        price_of(recipe.with_overrides(["hardware.replica=h9000"]), PRICES, None)


def test_cost_so_far() -> None:
    jobs = [job("h200", 360), job("h200x2", 720), job("h200", None), job("unheard-of", 999)]
    assert [job_cost(one, PRICES) for one in jobs] == [0.5, 2.0, 0.0, None]
    assert spent(jobs, PRICES) == 2.5


def test_earlier_starts_cost_what_was_noted_and_what_ended_without_a_kernel() -> None:
    jobs = [job("h200", 360, "a", "ERROR"), job("h200", 720, "b", "CANCELED"), job("h200x2", 720, "b", "RUNNING")]
    assert spent_before({}, jobs, PRICES) == 0.0
    assert spent_before({"status": "failed", "usd": 3.0, "launch": "b"}, jobs, PRICES) == 3.0
    # One that goes on is taken over, and counted then.
    assert spent_before({"status": "running", "usd": 0.5, "launch": "b"}, jobs, PRICES) == 1.5
    assert spent_before({"status": "running", "usd": 0.5, "launch": "c"}, jobs, PRICES) == 0.5


def test_budget_and_deadline_end_a_run(recipe: Recipe) -> None:
    limited = recipe.with_overrides(["hardware.budget_usd=5", "hardware.deadline_hours=2"])
    assert stop_reason(limited, 4.99, 1.99) is None
    assert "budget_usd" in (stop_reason(limited, 5.0, 0.1) or "")
    assert "deadline_hours" in (stop_reason(limited, 0.0, 2.0) or "")
    assert stop_reason(recipe, 1e6, 1.0) is None


def test_published_run_is_predicted_and_an_unknown_model_is_not(recipe: Recipe) -> None:
    step_s = predicted_step_s(recipe)
    assert step_s is not None
    assert 15 < step_s < 35  # its median was 22.9 s
    assert predicted_step_s(recipe.with_overrides(["model.name=nobody/knows"])) is None
