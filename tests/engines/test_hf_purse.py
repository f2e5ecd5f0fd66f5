"""Several rented runs within one total."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.hf_purse import Purse, billed, unbounded
from rlkit.recipe import load_recipe

RUNS = Path(__file__).parents[2] / "runs"


def test_run_starts_when_all_it_may_take_is_left() -> None:
    purse = Purse(25.0, "limits.usd")
    for run in ("a", "b"):
        assert purse.refusal(run, 10.0) is None
        purse.start(run, 10.0)
    left = "limits.usd: $5.00 of $25.00 is left and this run may take $10.00"
    assert purse.refusal("c", 10.0) == left
    purse.ended("a", 4.0)  # what was spent counts as spent, not as set aside
    assert (purse.spent_usd, purse.free_usd, purse.going) == (4.0, 11.0, 1)
    assert purse.refusal("c", 10.0) is None


def test_run_that_is_started_again_needs_what_it_has_not_spent() -> None:
    purse = Purse(10.0, "limits.usd")
    purse.ended("a", 6.0)
    assert purse.refusal("b", 10.0) == "limits.usd: $4.00 of $10.00 is left and this run may take $10.00"
    assert purse.refusal("a", 10.0) is None
    purse.start("a", 10.0)
    assert purse.free_usd == 0.0
    purse.ended("a", 10.5)  # it was looked at when it had spent more than it should
    assert purse.refusal("a", 10.0) == "hardware.budget_usd: all of $10.00 are spent by this run"
    assert purse.free_usd == 0.0


def test_runs_that_nobody_is_asked_about_need_a_total_and_a_budget_each() -> None:
    bare = load_recipe(RUNS / "published" / "r1-dp2.yaml")
    bound = bare.with_overrides(["hardware.budget_usd=7"])
    missing = "limits.usd: missing, and 2 points are on rented hardware (engine hf)"
    assert unbounded({"a": bound, "b": bare}, "2 points", None, "limits.usd") == missing
    unset = "hardware.budget_usd: not set, and b runs on engine hf"
    assert unbounded({"a": bound, "b": bare}, "2 points", 20.0, "limits.usd") == unset
    assert unbounded({"a": bound}, "1 point", 20.0, "limits.usd") is None
    assert unbounded({}, "0 points", None, "limits.usd") is None


@pytest.mark.parametrize(("state", "usd"), [({"usd": 2.5}, 2.5), ({"usd": 0}, 0.0), ({}, 7.0)])
def test_run_of_which_nothing_is_known_is_taken_to_have_cost_all_it_may(state: dict[str, object], usd: float) -> None:
    rented = load_recipe(RUNS / "published" / "r1-dp2.yaml", ["hardware.budget_usd=7"])
    assert billed(rented, state) == usd
    assert billed(load_recipe(RUNS / "local.yaml"), state) == 0.0


STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.1, 50.0), st.floats(0.0, 1.0)), max_size=40)


@given(st.floats(1.0, 200.0), STEPS)
def test_runs_that_keep_to_their_budgets_never_spend_more_than_the_total(
    total: float, steps: list[tuple[str, float, float]]
) -> None:
    purse, going, spent = Purse(total, "limits.usd"), dict[str, float](), dict[str, float]()
    for run, most_usd, used in steps:
        if run in going:
            most = going.pop(run)
            spent[run] = spent.get(run, 0.0) + (most - spent.get(run, 0.0)) * used
            purse.ended(run, spent[run])
        elif purse.refusal(run, most_usd) is None:
            purse.start(run, most_usd)
            going[run] = most_usd
        assert purse.going == len(going)
        may_still = sum(most - spent.get(run, 0.0) for run, most in going.items())
        assert purse.spent_usd == pytest.approx(sum(spent.values()))
        assert purse.spent_usd + may_still <= total + 1e-6
