"""Prices, costs, and when money or time end a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub.hub_server import HARDWARE
from huggingface_hub import JobHardwareInfo, JobInfo
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.hf_money import Price, Purse, allowance, hourly_prices, job_cost, price_of, spent, stop_reason
from rlkit.engines.hf_predict import predicted_step_s
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

PUBLISHED = Path(__file__).parents[2] / "runs" / "published"
PRICES = {"h200": 5.0, "h200x2": 10.0}


def job(flavor: str, seconds: int | None) -> JobInfo:
    return JobInfo(
        id="1",
        flavor=flavor,
        status={"stage": "RUNNING"},
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


def test_unknown_flavor_names_those_there_are(recipe: Recipe) -> None:
    with pytest.raises(BadInput, match=r"hardware.replica: 'h9000'.*h200, h200x2"):
        price_of(recipe.with_overrides(["hardware.replica=h9000"]), PRICES, None)


def test_cost_so_far() -> None:
    jobs = [job("h200", 360), job("h200x2", 720), job("h200", None), job("unheard-of", 999)]
    assert [job_cost(one, PRICES) for one in jobs] == [0.5, 2.0, 0.0, None]
    assert spent(jobs, PRICES) == 2.5


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


def cost(usd: float | None, most: float = 100.0) -> Price:
    hours = None if usd is None else usd / 20
    return Price(usd_per_hour=20.0, hours=hours, deadline_hours=24.0, budget_usd=most)


def test_allowance_has_room_for_the_start_and_is_never_more_than_the_most() -> None:
    assert allowance(cost(8.0)) == pytest.approx(15.0)  # 8 x 1.25 + a quarter of an hour at $20
    assert allowance(cost(8.0, most=9.0)) == 9.0
    assert allowance(cost(None)) == 100.0


def test_run_waits_for_the_money_or_the_place_of_another() -> None:
    purse = Purse(total_usd=40.0, at_once=2)
    assert purse.allow("a", cost(8.0)) == pytest.approx(15.0)
    assert purse.allow("b", cost(8.0)) == pytest.approx(15.0)
    assert purse.allow("c", cost(1.0)) is None  # two go on
    purse.ended("a", 6.0)
    assert purse.allow("c", cost(12.0)) is None  # it would take 20, and 40 - 6 - 15 are left
    assert purse.allow("c", cost(8.0)) == pytest.approx(15.0)
    purse.ended("b", 15.0)
    purse.ended("c", 15.0)
    assert (purse.spent_usd, purse.free_usd, purse.going) == (36.0, 4.0, 0)


def test_run_that_can_never_start_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a: it is allowed \$15.00, and \$10.00 of \$10.00 are left"):
        Purse(total_usd=10.0, at_once=2).allow("a", cost(8.0))


RUNS = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.1, 50.0), st.floats(0.0, 1.0)), max_size=40)


@given(st.floats(1.0, 200.0), st.integers(1, 4), RUNS)
def test_runs_that_keep_to_their_allowance_never_spend_more_than_all(
    total: float, at_once: int, runs: list[tuple[str, float, float]]
) -> None:
    purse, going = Purse(total, at_once), dict[str, float]()
    for name, predicted, used in runs:
        if name in going:
            purse.ended(name, going.pop(name) * used)
            continue
        try:
            allowed = purse.allow(name, cost(predicted))
        except BadInput:
            assert not going
            continue
        if allowed is not None:
            going[name] = allowed
        assert len(going) == purse.going <= at_once
        assert purse.spent_usd + sum(going.values()) <= total + 1e-9
