from __future__ import annotations

from dataclasses import replace

import pytest

from rlkit.simulation.cells import Tolerance
from rlkit.simulation.published import compare, published_runs
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate


def test_nine_runs_have_their_recipes() -> None:
    runs = published_runs()
    assert len(runs) == 9
    assert [run.recipe.name for run in runs] == [run.name for run in runs]


@pytest.mark.parametrize(
    ("tolerance", "inside", "outside"),
    [
        (Tolerance("relative", 0.1), 110.0, 111.0),
        (Tolerance("absolute", 5.0), 95.0, 94.0),
        (Tolerance("factor", 2.0), 51.0, 49.0),
        (Tolerance("below", 500), 499.0, 500.0),
        (Tolerance("between", 40, 110), 110.0, 39.0),
        (Tolerance("absolute", 0.0), 100.0, 100.1),
    ],
)
def test_a_tolerance_allows_what_it_says(tolerance: Tolerance, inside: float, outside: float) -> None:
    assert tolerance.allows(inside, 100.0, 100.0)
    assert not tolerance.allows(outside, 100.0, 100.0)
    assert tolerance.text


def test_a_range_is_met_anywhere_in_it() -> None:
    assert Tolerance("relative", 0.1).allows(150.0, 100.0, 200.0)


def test_the_beginning_of_the_chase_is_packed_as_published() -> None:
    packed = next(run for run in published_runs() if run.name == "r1-dp2-tb16k")
    run = simulate(replace(setup_of(packed.recipe), stop_after=12))
    rows = [step.metrics["batch/samples_per_row"] for step in run.steps]
    assert sum(rows) / len(rows) == pytest.approx(12.7, rel=0.1)


@pytest.mark.slow
def test_every_judged_figure_is_within_its_tolerance() -> None:
    comparison = compare(seeds=3)
    assert comparison.misses == []
    assert comparison.chase_cpu_s <= 30
    assert comparison.longest_run_cpu_s <= 15
