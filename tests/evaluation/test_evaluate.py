from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from rlkit.evaluation.evaluate import Judged, half_of, judge_runs, score
from rlkit.evaluation.interventions import CAUSES, FASTER, SIDES, Labelled, label, more_in_flight, more_replicas
from rlkit.evaluation.scenarios import KINDS, scenarios


def test_the_same_seed_draws_the_same_scenarios_and_every_kind() -> None:
    drawn = scenarios(2 * len(KINDS), seed=3)

    assert drawn == scenarios(2 * len(KINDS), seed=3)
    assert drawn != scenarios(2 * len(KINDS), seed=4)
    assert {one.kind for one in drawn} == set(KINDS)


def test_a_scenario_is_of_one_half_whatever_is_drawn_beside_it() -> None:
    """Else those that were tuned on would be judged as if they were not, once two seeds are asked for."""
    drawn = [one for seed in (3, 4) for one in scenarios(len(KINDS), seed)]

    assert {half_of(one) for one in drawn} == {"tuning"}
    assert half_of(replace(drawn[0], name=f"s{len(KINDS):04d}")) == "report"


def test_two_runs_that_are_compared_draw_the_same_lengths() -> None:
    scenario = scenarios(1)[0]
    first, second, other = (scenario.setup(5, seed).lengths for seed in (0, 0, 1))
    prompt = first.prompt(0)
    import random

    drawn = [
        [lengths.completion(prompt, 0.0, random.Random()) for _ in range(20)] for lengths in (first, second, other)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_more_replicas_leave_the_fixed_time_of_an_iteration_alone() -> None:
    setup = scenarios(1)[0].setup(5, 0)
    before, after = setup.engines[0].rates, more_replicas(setup).engines[0].rates

    assert after.base_s == before.base_s
    assert after.sequence_s == pytest.approx(before.sequence_s / FASTER)
    assert more_in_flight(setup).max_inflight == round(setup.max_inflight * FASTER)


def test_a_trainer_of_tiny_rows_gains_by_what_a_row_costs() -> None:
    scenario = scenarios(1)[0]  # the first kind
    labelled = label(scenario, 0, steps=12)

    assert set(labelled.sides) == set(SIDES)
    assert max(labelled.sides, key=lambda side: labelled.sides[side]) == "trainer"
    assert set(labelled.causes) == set(CAUSES["trainer"])
    assert labelled.causes["rows"] > labelled.causes["tokens"]
    assert len(labelled.frame) == 12


def test_a_label_is_the_mean_over_the_seeds() -> None:
    scenario = scenarios(1)[0]
    frame = pd.DataFrame()
    gains = [{"trainer": 0.05, "generation": 0.0}, {"trainer": 0.0, "generation": 0.03}]
    causes = [{"rows": 0.04, "tokens": 0.01}, {"replicas": 0.03}]
    runs = [Labelled(scenario, seed, frame, gains[seed], causes[seed]) for seed in range(2)]

    judged = judge_runs(runs, "report")

    assert [(run.side, run.cause, run.half, run.bound) for run in judged] == [
        ("trainer", "rows", "report", "undetermined")
    ] * 2
    assert judge_runs([Labelled(scenario, 0, frame, {"trainer": 0.01}, {"rows": 0.01})], "tuning")[0].side == "none"


def test_how_often_experiments_on_one_run_agree_with_those_on_its_other_seeds() -> None:
    scenario, frame = scenarios(1)[0], pd.DataFrame()
    sides = [{"trainer": 0.05, "sync": 0.01}, {"trainer": 0.02, "sync": 0.03}, {"trainer": 0.04, "sync": 0.01}]
    runs = [Labelled(scenario, seed, frame, sides[seed], {}) for seed in range(3)]

    assert [run.shown_again for run in judge_runs(runs, "report")] == [True, False, True]
    assert score(judge_runs(runs, "report")).shown_again == pytest.approx(2 / 3)
    assert score(judge_runs(runs[:1], "report")).shown_again is None


def run(side: str, cause: str, bound: str, named: str, probability: float = 0.9) -> Judged:
    return Judged("s", "border", 0, "report", 0.05, side, cause, bound, named, probability)


def test_what_counts_as_right() -> None:
    scored = score(
        [
            run("trainer", "tokens", "trainer", "recompute"),
            run("trainer", "rows", "trainer", "compute"),
            run("generation", "in-flight", "trainer", "client-limit", 0.7),
            run("none", "rows", "balanced", "", 0.7),
        ]
    )

    assert (scored.bound_runs, scored.free_runs) == (3, 1)
    assert scored.side_right == pytest.approx(2 / 3)
    assert scored.cause_right == pytest.approx(1 / 3)
    assert scored.free_right == 1.0
    assert scored.calibration == {"0.9": (2, 1.0), "0.7": (2, 0.5)}
    assert scored.confusion["generation"] == {"trainer": 1}
    assert scored.causes["rows"] == {"compute": 1}
