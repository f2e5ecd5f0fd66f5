"""Logs as they should not be: an opinion on each, and never a wrong side that is said to be sure."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import cache

import numpy as np
import pandas as pd
import pytest
from recorded_runs import recipe, recorded

from rlkit.diagnosis import Verdict, diagnose
from rlkit.evaluation.interventions import logged
from rlkit.evaluation.scenarios import scenarios
from rlkit.recipe import Recipe
from rlkit.simulation.simulate import simulate

TRUTH = {"trainer-bound-run": "trainer", "learning-run": "generation"}
READ = ("perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_s", "sample/rollout_queue_size",
        "batch/samples_per_step", "rollout/backpressure_s", "rollout/inflight", "rollout/generated_tok_s",
        "sample/staleness_mean")  # fmt: skip


def recipe_of(run: str) -> Recipe:
    overrides = ["train.token_budget=0", "train.gradient_accumulation_steps=64", "train.gradient_checkpointing=true"]
    return recipe().with_overrides(overrides) if run == "trainer-bound-run" else recipe()


def not_surely_wrong(run: str, frame: pd.DataFrame) -> Verdict:
    verdict = diagnose(frame, recipe_of(run))
    assert verdict.bound in (TRUTH[run], "balanced", "undetermined") or verdict.confidence != "high"
    return verdict


@pytest.mark.parametrize("run", TRUTH)
def test_any_one_or_two_metrics_may_be_missing(run: str) -> None:
    frame = recorded(run)
    there = [name for name in READ if name in frame]
    for missing in [(name,) for name in there] + list(itertools.combinations(there, 2)):
        verdict = not_surely_wrong(run, frame.drop(columns=list(missing)))
        assert verdict.bound in (TRUTH[run], "balanced", "undetermined"), missing


@pytest.mark.parametrize("run", TRUTH)
def test_a_third_of_the_rows_may_be_lost(run: str) -> None:
    frame = recorded(run)
    for seed in range(3):
        kept = np.random.default_rng(seed).random(len(frame)) > 0.3
        assert not_surely_wrong(run, frame[kept]).bound in (TRUTH[run], "undetermined")


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("run", TRUTH)
def test_values_that_nobody_measured_count_as_absent(run: str, junk: float) -> None:
    frame = recorded(run)
    numbers = frame.drop(columns="timestamp").astype("float64")
    numbers = numbers.mask(np.random.default_rng(1).random(numbers.shape) < 0.2, junk)

    assert not_surely_wrong(run, numbers).bound in (TRUTH[run], "undetermined")


@pytest.mark.parametrize("run", TRUTH)
def test_a_resumed_run_says_what_the_whole_one_does(run: str) -> None:
    """The second part repeats three steps, and comes before the first one in the log."""
    frame = recorded(run)
    resumed = pd.concat([frame.iloc[8:], frame.iloc[:11]])

    assert diagnose(resumed, recipe_of(run)) == diagnose(frame, recipe_of(run))


@pytest.mark.parametrize("run", TRUTH)
def test_five_steps_are_too_few(run: str) -> None:
    assert diagnose(recorded(run).iloc[:5], recipe_of(run)).bound == "undetermined"


@pytest.mark.parametrize("run", TRUTH)
@pytest.mark.parametrize(("name", "factor"), [("perf/mfu_fwd_bwd", 0.01), ("perf/mfu_wall_clock", 0.01),
                                              ("perf/step_s", 1000.0), ("perf/rollout_wait_s", 1000.0),
                                              ("perf/fwd_bwd_s", 1000.0)])  # fmt: skip
def test_another_unit_is_no_other_side_for_sure(run: str, name: str, factor: float) -> None:
    not_surely_wrong(run, recorded(run).assign(**{name: lambda frame: frame[name] * factor}))


@pytest.mark.parametrize("run", TRUTH)
def test_a_constant_column_is_no_other_side_for_sure(run: str) -> None:
    frame = recorded(run)
    for name in READ:
        for value in (0.0, 1.0):
            not_surely_wrong(run, frame.assign(**{name: value}))


OF_SERVERS = ("rollout/replica_speed_spread", "rollout/replica_load_spread", "rollout/kv_cache_usage",
              "rollout/vllm_queued_requests", "rollout/vllm_preemptions_total", "rollout/score_s",
              "rollout/score_wait_s")  # fmt: skip

# Scenarios of the evaluation by number, and what interventions show to bound each.
SIMULATED = {7: "sync", 10: "trainer", 18: "scoring", 23: "generation"}


@cache
def simulated(number: int) -> tuple[pd.DataFrame, Recipe]:
    """A run with every metric that the worker logs."""
    scenario = scenarios(number + 1, seed=11)[number]
    return logged(scenario, simulate(scenario.setup(40, 0), 0)), scenario.recipe


@pytest.mark.parametrize("number", SIMULATED)
def test_any_metric_of_a_simulated_run_may_be_missing(number: int) -> None:
    frame, recipe = simulated(number)
    assert diagnose(frame, recipe).bound == SIMULATED[number]
    for name in frame.columns.drop("timestamp"):
        verdict = diagnose(frame.drop(columns=name), recipe)
        right = verdict.bound in (SIMULATED[number], "balanced", "undetermined")
        assert right or verdict.confidence != "high", name


@pytest.mark.parametrize("name", OF_SERVERS)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e9, np.inf])
def test_a_constant_of_the_servers_is_no_other_side_for_sure(name: str, value: float) -> None:
    frame, recipe = simulated(23)
    verdict = diagnose(frame.assign(**{name: value}), recipe)

    assert verdict.bound in ("generation", "balanced", "undetermined") or verdict.confidence != "high"


def test_a_run_whose_last_step_never_came_has_stalled() -> None:
    frame = recorded("learning-run")
    end = frame["timestamp"].max()
    later = diagnose(frame, recipe(), now=end + timedelta(minutes=10))

    assert (later.bound, later.confidence, later.cause) == ("stalled", "high", None)
    assert later.headline.startswith("Stalled: the last step was logged 600 s ago")
    assert diagnose(frame, recipe(), now=end + timedelta(seconds=5)).bound == "generation"


def test_a_last_step_that_only_waited_has_stalled() -> None:
    frame = recorded("learning-run")
    last = frame.index[-1]
    frame.loc[last, ["perf/step_s", "perf/rollout_wait_s"]] = [300.0, 299.0]

    assert diagnose(frame, recipe()).bound == "stalled"


def test_the_timeline_says_when_a_run_changed() -> None:
    rows = recorded("learning-run")
    busy = pd.DataFrame({"perf/step_s": 2.0, "perf/fwd_bwd_s": 1.8, "perf/rollout_wait_s": 0.01,
                         "sample/rollout_queue_size": 220.0, "batch/samples_per_step": 64.0},
                        index=pd.RangeIndex(51, 101, name="global_step"))  # fmt: skip
    verdict = diagnose(pd.concat([rows, busy]), recipe())

    assert verdict.timeline[0].bound == "generation"
    assert verdict.timeline[-1].bound == "trainer"
    assert verdict.timeline[-1].last_step == 100


def test_a_full_queue_and_a_waiting_trainer_are_said_to_contradict_each_other() -> None:
    frame = recorded("learning-run").assign(**{"sample/rollout_queue_size": 230.0})
    verdict = diagnose(frame, recipe())

    assert verdict.bound == "undetermined"
    assert verdict.contradictions == [
        "The queue is full (230 of 256), and yet the trainer waits 67 % of the step for rollouts."
    ]
