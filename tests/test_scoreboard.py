"""The scoreboard of several runs, its companions, and how they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

import pandas as pd
import pytest
from recorded_runs import recipe
from several_runs import generation_bound, past_run, steps, trainer_bound

from rlkit.recipe import load_recipe
from rlkit.recipe_changes import changes_table
from rlkit.scoreboard import FIGURES, change_text, figures_of, headline, routing, scoreboard, weight_syncs
from rlkit.scoreboard_text import (
    about,
    breakable,
    published_figures,
    routing_table,
    scoreboard_table,
    sync_table,
)
from rlkit.signals import settled_steps
from rlkit.simulation.cells import STATISTICS, SimulatedRun
from rlkit.simulation.frame import frame_of
from rlkit.simulation.published import RECIPES
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate

PROXY = {
    "routed": 200, "affinity": 150, "spilled": 10, "unmatched": 40, "round_robin": 0,
    "per_replica": [{"routed": 120}, {"routed": 80}],
    "adapters": [{"attempts": [1, 3]}, {"attempts": [2, 3]}, {"attempts": [0, 9]}],
}  # fmt: skip


def cells(table: pd.DataFrame, run: str) -> dict[str, str]:
    return dict(zip(table.iloc[:, 0], table[run], strict=True))


def test_a_row_a_run_with_figures_that_can_be_worked_out() -> None:
    board = scoreboard({"slow": trainer_bound(), "fast": generation_bound("fast", "train.token_budget=1024")})
    slow = board.loc["slow"]
    assert list(slow[["step_s", "fwd_bwd_s", "queue", "mfu", "generated_tok_s"]]) == [4, 3, 224, 4, 1000]
    assert slow["samples_s"] == 64 / 4
    assert slow["steps"] == 20
    assert slow["minutes"] == pytest.approx(20 * 4 / 60)
    # 20 more steps, as long as the mean: 15 steps of 4 s with four syncs of 2 s in them, and a sync every four steps.
    whole_s = 20 * 4 + 20 * ((15 * 4 - 4 * 2) / 15 + 2 / 4)
    assert slow["recipe_minutes"] == pytest.approx(whole_s / 60)
    assert slow["usd"] == pytest.approx(20 * 4 * 36 / 3600)
    assert slow["recipe_usd"] == pytest.approx(whole_s * 36 / 3600)
    assert list(board["bound"]) == ["trainer", "generation"]
    assert pd.isna(slow["change"])
    assert board["change"]["fast"] == "train.token_budget 512 → 1024"
    assert math.isnan(board.loc["fast", "backpressure_s"])


def test_without_recipe_price_or_times_nothing_is_made_up() -> None:
    frame = steps(perf__fwd_bwd_s=1).drop(columns="timestamp")
    board = scoreboard({"bare": past_run("bare", frame, logged_recipe=False), "next": generation_bound()})
    bare = board.loc["bare"]
    assert bare[["engine", "cause"]].isna().all()
    assert bare[["minutes", "usd", "recipe_minutes", "recipe_usd", "queue_maxsize", "step_s"]].isna().all()
    table = scoreboard_table(board)
    told = cells(table, "bare")
    assert told["Step, s"] == "not logged"
    assert told["Cost of that"] == "no price"
    assert told["Whole recipe, min"] == told["Engine"] == "unknown"
    assert cells(table, "next")["What changed"] == "unknown"
    assert "nan" not in table.to_string().lower().replace("nan_", "")


def test_a_run_that_ended_before_it_settled_is_told_from_one_that_logged_nothing() -> None:
    whole = trainer_bound()
    board = scoreboard({"brief": replace(whole, frame=whole.frame.head(1)), "whole": whole})
    assert list(board["settled"]) == [0, len(settled_steps(whole.frame, whole.recipe))]
    told = cells(scoreboard_table(board), "brief")
    assert {told["Step, s"], told["Queue, samples"], told["Held back, s"]} == {"only the start"}
    assert cells(scoreboard_table(board), "whole")["Step, s"] == "4"


def test_changes_leave_out_the_name_and_where_a_run_is_logged() -> None:
    plan = trainer_bound()
    other = trainer_bound("other", "tracking.project=elsewhere", "train.gradient_checkpointing=false")
    assert change_text(plan, other) == "train.gradient_checkpointing true → false"
    assert change_text(plan, trainer_bound("same")) == "none"
    assert changes_table(plan.recipe, other.recipe).to_numpy().tolist() == [
        ["train.gradient_checkpointing", "true", "false"]
    ]
    assert changes_table(None, plan.recipe).empty
    assert change_text(plan, trainer_bound("dear", "hardware.usd_per_hour=99")) == "none"
    fields = ("serve.replicas=2", "train.seed=7", "train.steps=9", "train.token_budget=64", "train.learning_rate=1")
    assert str(change_text(plan, trainer_bound("far", *fields))).startswith("5 fields: train.steps 40 → 9, ")


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            ["slow", "fast"],
            "2 runs: 40 steps go from 2.66 min to 40 s, 3.98 times as fast; what bounded them: trainer, ",
        ),
        (["fast", "slow"], "2 runs: 40 steps go from 40 s to 2.66 min, 3.98 times as slow; what bounded them: gen"),
        (["slow"], "One run, 4 s a step, bound by: trainer."),
    ],
)
def test_the_headline_compares_the_first_with_the_last(runs: list[str], said: str) -> None:
    made = {"slow": trainer_bound(), "fast": generation_bound()}
    assert headline(scoreboard({name: made[name] for name in runs})).startswith(said)


def test_runs_of_different_lengths_are_compared_by_their_step() -> None:
    board = scoreboard({"slow": trainer_bound(), "fast": generation_bound("fast", "train.steps=80")})
    assert headline(board).startswith("2 runs: the median step goes from 4 s to 1 s, 4 times as fast")


@pytest.mark.parametrize("seconds", [1.0, 1.001, 0.999])
def test_equal_runs_are_as_fast(seconds: float) -> None:
    board = scoreboard({"one": generation_bound(), "same": generation_bound("same", "train.steps=80")})
    board.loc["same", "step_s"] = seconds
    assert ", as fast; what bounded them: " in headline(board)


def test_a_weight_sync_is_split_and_its_loads_are_counted_by_attempts() -> None:
    syncs = weight_syncs({"slow": trainer_bound(proxy=PROXY), "fast": generation_bound()})
    slow = syncs.loc["slow"]
    assert list(slow[["syncs", "whole_s", "pause_s", "save_s", "accept_s"]]) == [5, 2, 0.25, 0.5, 1.25]
    assert slow["share"] == pytest.approx(5 * 2 / 80)
    assert list(slow.filter(like="attempts")) == [1, 1, 2, 1]
    assert slow["loads"] == 5  # a replica that was never asked (0 attempts) had no load
    assert syncs.loc["fast"].drop("syncs").isna().all()
    told = cells(sync_table(syncs), "fast")
    assert told["Whole, s (median)"] == "not logged"
    assert told["with three"] == "no counters"


def test_routing_counts_and_shares() -> None:
    counts = routing({"slow": trainer_bound(proxy=PROXY), "fast": generation_bound()})
    assert list(counts.loc["slow"]) == [200, 150, 10, 40, 0, "120 / 80"]
    table = routing_table(counts)
    assert list(cells(table, "slow").values()) == ["200", "120 / 80", "75 %", "5 %", "20 %", "0 %"]
    assert set(cells(table, "fast").values()) == {"no counters"}


def test_published_figures_stand_in_brackets_and_those_of_a_whole_run_only_beside_one() -> None:
    frame = steps(500, perf__step_s=20.0, perf__fwd_bwd_s=19.0)
    plan = load_recipe(RECIPES / "published" / "r1-dp2.yaml")
    whole = replace(past_run("r1-dp2", frame), recipe=plan, proxy=PROXY)
    part = replace(whole, frame=frame.head(100))
    runs = {"whole": whole, "part": part, "mine": trainer_bound()}
    published = published_figures(runs)
    assert list(published) == ["whole", "part"]
    table = scoreboard_table(scoreboard(runs), published)
    assert cells(table, "whole")["Step, s"] == cells(table, "part")["Step, s"] == "20 (22.9)"
    assert cells(table, "whole")["Whole recipe, min"] == "167 (207)"
    assert cells(table, "part")["Whole recipe, min"] == "167"
    assert cells(table, "mine")["Step, s"] == "4"
    routed = routing_table(routing(runs), published)
    assert cells(routed, "whole")["Rollouts routed"] == "200 (64,728)"
    assert cells(routed, "whole")["to each replica"] == "120 / 80 (31,928 / 32,800)"
    assert cells(routed, "part")["to the replica with their prompt"] == "75 % (85 %)"
    assert cells(routed, "part")["Rollouts routed"] == "200"


def test_long_names_may_be_broken_on_a_page_and_read_the_same() -> None:
    table = pd.DataFrame({"": ["Cause"], "run": ["rollout.max_inflight_tasks 0.5 → 1.5"]})
    broken = breakable(table)
    assert broken["run"][0] == "rollout.\u200bmax_\u200binflight_\u200btasks 0.5 → 1.5"
    assert broken["run"][0].replace("\u200b", "") == table["run"][0]


def test_what_the_runs_are_is_said_once() -> None:
    runs = {"slow": trainer_bound(), "fast": generation_bound("fast", "engine=sim")}
    assert about(runs, {}) == {"runs": "slow, fast", "engine": "local, sim"}
    assert list(about(runs, {"slow": {}})) == ["runs", "engine", "in brackets:"]


def test_many_runs_are_rows() -> None:
    runs = {f"run-{number}": generation_bound(f"run-{number}") for number in range(7)}
    table = scoreboard_table(scoreboard(runs))
    assert table.columns[0] == "Run"
    assert table["Run"].to_list() == list(runs)
    assert table["Verdict"].to_list() == ["generation-bound"] * 7


def test_statistics_are_those_that_published_figures_are_compared_by() -> None:
    """A simulation measured through its frame gives the very cells of `rlkit simulate --published`."""
    plan = recipe().with_overrides(["engine=sim", "train.steps=12", "hardware.trainer=cpu"])
    run = simulate(setup_of(plan), 0)
    ours, theirs = figures_of(frame_of(run), plan), SimulatedRun(plan, run)
    spelled: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "median": ("median of steps", median),
        "mean": ("mean of steps", fmean),
    }
    for figure in FIGURES:
        text, _ = spelled[figure.statistic]
        assert [one.text for one in STATISTICS[figure.metric]] == [text]
        values = theirs.values(figure.metric)
        if values:
            assert ours[figure.name] == pytest.approx(spelled[figure.statistic][1](values)), figure.name
        else:
            assert math.isnan(ours[figure.name])
