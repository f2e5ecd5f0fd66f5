"""What an hour and a run cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.price import usd_of, usd_paid, usd_per_hour
from rlkit.recipe import load_recipe

CHASE = load_recipe(Path(__file__).parents[1] / "runs" / "published" / "r1-dp2.yaml")  # four GPUs, $20 an hour


def test_a_gpu_costs_what_it_costs_in_the_recipe() -> None:
    assert usd_per_hour(CHASE, CHASE) == 20
    assert usd_per_hour(CHASE, CHASE.with_overrides(["serve.replicas=3"])) == 25
    free = CHASE.with_overrides(["hardware.usd_per_hour=null"])
    assert usd_per_hour(free, free.with_overrides(["serve.replicas=3"])) is None


def test_a_price_of_its_own_goes_before() -> None:
    assert usd_per_hour(CHASE, CHASE.with_overrides(["serve.replicas=3", "hardware.usd_per_hour=2"])) == 2


@pytest.mark.parametrize(("minutes", "usd"), [(30.0, 10.0), (0.0, 0.0), (None, None)])
def test_a_run_costs_its_hours(minutes: float | None, usd: float | None) -> None:
    assert usd_of(CHASE, minutes) == usd
    assert usd_of(CHASE.with_overrides(["hardware.usd_per_hour=null"]), minutes) is None


def test_what_was_billed_is_in_the_runs_state() -> None:
    assert usd_paid({"status": "finished", "usd": 1.5}) == 1.5
    assert usd_paid({"status": "finished"}) is None
