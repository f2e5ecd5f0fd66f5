"""Figures of several runs: what is worked out, and what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from several_runs import generation_bound, past_run, steps, trainer_bound

from rlkit import chase_figures, overlay
from rlkit.errors import BadInput
from rlkit.past_run import PastRun
from rlkit.run_looks import looks

PACKED = ("train.token_budget=16384", "train.gradient_accumulation_steps=6")


def chase() -> dict[str, PastRun]:
    """Five runs whose changes are those of the published chase."""
    return {
        "one": trainer_bound("one", "train.token_budget=0", "train.gradient_accumulation_steps=64"),
        "two": trainer_bound("two", *PACKED),
        "three": generation_bound("three", *PACKED, "train.gradient_checkpointing=false"),
        "four": generation_bound("four", *PACKED, "train.gradient_checkpointing=false", "serve.replicas=3"),
        "five": trainer_bound(
            "five", *PACKED, "train.gradient_checkpointing=false", "serve.replicas=3", "rollout.max_inflight_tasks=128"
        ),
    }


def learning(name: str, step_s: float = 2.0, reward: float = 0.5) -> PastRun:
    frame = steps(perf__step_s=step_s, perf__fwd_bwd_s=1, ratio=1.0).assign(reward=np.linspace(0.1, reward, 20))
    return past_run(name, frame)


def named(figure: go.Figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.showlegend]


def panels(figure: go.Figure) -> list[str]:
    """The panels' titles, from top to bottom."""
    return [note.text.split("</b>")[0].removeprefix("<b>") for note in figure.layout.annotations if "<b>" in note.text]


def text(figure: go.Figure) -> str:
    return " ".join(note.text for note in figure.layout.annotations)


ALL: dict[str, Callable[[dict[str, PastRun]], go.Figure]] = {
    "1 dashboard": lambda runs: chase_figures.dashboard(runs, "one"),
    "2 packing": lambda runs: chase_figures.change(runs, "two"),
    "3 checkpointing": lambda runs: chase_figures.change(runs, "three"),
    "4 third replica": lambda runs: chase_figures.change(runs, "four"),
    "5 all runs": chase_figures.all_runs,
}
SHOWN = {
    "1 dashboard": ["Seconds per step", "Samples in the queue", "Seconds a finished rollout is held back"],
    "2 packing": ["Seconds per step", "MFU of forward and backward, %", "Samples in the queue"],
    "3 checkpointing": [
        "Seconds of forward and backward",
        "Seconds the trainer waits for rollouts",
        "Samples in the queue",
    ],
    "4 third replica": ["Tokens generated per second", "Seconds the trainer waits for rollouts"],
    "5 all runs": [
        "Seconds per step",
        "Samples in the queue",
        "Seconds the trainer waits for rollouts",
        "Tokens generated per second",
    ],
}


@pytest.mark.parametrize("name", ALL)
def test_each_published_figure_has_its_panels_on_one_axis_and_says_what_it_shows(name: str) -> None:
    figure = ALL[name](chase())
    assert panels(figure) == SHOWN[name]
    assert {trace.xaxis for trace in figure.data} == {None}  # all on the one x axis
    assert len({trace.yaxis for trace in figure.data}) == len(SHOWN[name])
    domains = [figure.layout[f"yaxis{number or ''}"].domain for number in [0, *range(2, len(SHOWN[name]) + 1)]]
    assert domains == sorted(domains, reverse=True)
    assert all(lower[1] < upper[0] for upper, lower in pairwise(domains))
    assert figure.layout.title.text.endswith("?")
    assert "nan" not in figure.layout.meta["alt"]
    assert figure.layout.xaxis.title.text.endswith("lines: mean of the last 4 steps)")  # smoothing is labelled


def test_the_words_of_a_figure_are_the_scoreboards_figures() -> None:
    said = chase_figures.change(chase(), "three").layout.meta["alt"]
    assert "Seconds of forward and backward (median): two 3, three 0.4." in said
    assert "Samples in the queue (median): two 224, three 4." in said
    assert (
        "Tokens generated per second (mean): three 4,000, four 4,000."
        in (chase_figures.change(chase(), "four").layout.meta["alt"])
    )


def test_the_title_asks_what_the_change_did() -> None:
    runs = chase()
    asked = [chase_figures.change(runs, name).layout.title.text for name in ("two", "three", "four", "five")]
    assert asked == [
        "What did train.token_budget 0 → 16384 and train.gradient_accumulation_steps 64 → 6 change?",
        "What did train.gradient_checkpointing true → false change?",
        "What did serve.replicas 1 → 3 change?",
        "What did rollout.max_inflight_tasks 64 → 128 change?",
    ]
    same = {"one": trainer_bound("one"), "two": trainer_bound("two")}
    assert chase_figures.change(same, "two").layout.title.text == "What changed from one to two?"
    with pytest.raises(BadInput, match="one: is the first run"):
        chase_figures.change(runs, "one")


def test_a_run_keeps_its_colour_dash_and_marker_in_every_figure() -> None:
    runs = chase()
    look = looks(runs)
    assert len({(one.colour, one.dash, one.symbol) for one in look.values()}) == len(runs)
    assert len({one.dash for one in look.values()}) == len({one.colour for one in look.values()}) == len(runs)
    for figure in (
        chase_figures.change(runs, "three"),
        chase_figures.change(runs, "four"),
        chase_figures.all_runs(runs),
    ):
        for trace in figure.data:
            assert trace.line.color == look[trace.name].colour
            if trace.opacity is None:  # the thin line of each step has no dash
                assert trace.line.dash == look[trace.name].dash


def test_looks_stay_apart_far_beyond_five_runs() -> None:
    look = looks(f"run {number}" for number in range(40))
    assert len(set(look.values())) == 40


def test_a_run_is_named_once_however_many_panels_it_is_in() -> None:
    assert named(chase_figures.all_runs(chase())) == ["one", "two", "three", "four", "five"]
    assert named(chase_figures.dashboard(chase(), "one")) == ["one", "of it forward and backward"]


def test_each_step_is_drawn_beside_its_trend_for_two_runs_and_not_for_five() -> None:
    two = chase_figures.change(chase(), "two")
    assert any(trace.opacity for trace in two.data)
    assert "(thick lines: mean of" in two.layout.xaxis.title.text
    five = chase_figures.all_runs(chase())
    assert not any(trace.opacity for trace in five.data)
    assert "(lines: mean of" in five.layout.xaxis.title.text


def test_a_trend_is_the_mean_of_whole_rounds_of_syncs() -> None:
    run = trainer_bound("long", "rollout.weight_sync_steps=3")
    run = replace(run, frame=pd.concat([run.frame.set_index(run.frame.index + 20 * turn) for turn in range(10)]))
    assert overlay.window_for({"long": run}) == 12  # a twentieth of 200 steps is 10, and 12 is four rounds
    (data,) = overlay.overlay({"long": run}, [overlay.STEP], window=12)
    (series,) = data.series
    assert series.trend is not None
    assert series.trend.index[0] == 12
    assert series.trend.iloc[0] == pytest.approx(series.values.iloc[:12].mean())
    assert overlay.window_for({"short": replace(run, frame=run.frame.head(7))}) == 1
    assert overlay.window_for({}) == 1


def test_a_panel_reaches_as_far_as_the_steps_after_the_start_and_says_what_is_beyond() -> None:
    run = generation_bound()
    run.frame.loc[1, "perf/rollout_wait_s"] = 30.0
    figure = chase_figures.all_runs({"fast": run})
    assert figure.layout.yaxis3.range[1] == pytest.approx(0.5 * 1.08)
    assert "at the start up to 30" in text(figure)
    run.frame.loc[15, "perf/rollout_wait_s"] = 4.5
    three = chase_figures.all_runs({"fast": run, "a": generation_bound("a"), "b": generation_bound("b")}, window=4)
    assert three.layout.yaxis3.range[1] == pytest.approx((3 * 0.5 + 4.5) / 4 * 1.08)  # no more than what is drawn
    assert "at the start up to 7.88" in text(three)


def test_the_queue_stands_against_its_size() -> None:
    runs = {"a": trainer_bound("a"), "b": trainer_bound("b", "rollout.queue_maxsize=512", "train.token_budget=0")}
    figure = chase_figures.change(runs, "b")
    assert [shape.y0 for shape in figure.layout.shapes] == [256, 512]
    assert "queue_maxsize 256" in text(figure)
    assert "queue_maxsize 512" in text(figure)


def test_x_is_the_step_or_the_minutes_since_a_runs_first_step() -> None:
    by_step = chase_figures.all_runs(chase(), window=1).data[0]
    by_minutes = chase_figures.all_runs(chase(), "minutes", window=1)
    assert list(by_step.x[:2]) == [1, 2]
    assert by_minutes.data[0].x[1] == pytest.approx(4 / 60)
    assert by_minutes.layout.xaxis.title.text == "Minutes since the first logged step"
    with pytest.raises(BadInput, match="'hours'"):
        chase_figures.all_runs(chase(), "hours")  # type: ignore[arg-type]


def test_a_simulated_reward_is_a_sentence_and_no_curve() -> None:
    runs = {"a": generation_bound("a", "engine=sim"), "b": generation_bound("b", "engine=sim")}
    for figure in (chase_figures.reward_by_minutes(runs), chase_figures.reward_and_ratio(runs)):
        assert not figure.data
        assert "reward: not simulated, it has no physics" in figure.layout.meta["alt"]
        assert "not logged" not in figure.layout.meta["alt"]
    assert "ratio: not simulated" in chase_figures.reward_and_ratio(runs).layout.meta["alt"]


def test_real_rewards_are_drawn_and_who_has_none_is_named_with_the_reason() -> None:
    runs = {
        "real": learning("real"),
        "other": learning("other", 1.0, 0.9),
        "sim": generation_bound("sim", "engine=sim"),
        "silent": generation_bound("silent"),
    }
    figure = chase_figures.reward_by_minutes(runs, window=4)
    assert named(figure) == ["real", "other"]
    absent = "not simulated of sim, it has no physics; not logged by silent"
    assert absent in text(figure)
    assert f"Reward: {absent}." in figure.layout.meta["alt"]
    assert max(figure.data[-1].x) == pytest.approx(19 / 60)
    both = chase_figures.reward_and_ratio(runs)
    assert panels(both) == ["Reward", "Importance ratio"]
    low, high = both.layout.yaxis2.range
    assert low < 0.99 < 1.01 < high < 1.02
    assert both.layout.shapes[0].type == "rect"


def test_backpressure_that_never_was_is_no_gap_in_the_log() -> None:
    runs = {"fast": generation_bound()}
    figure = chase_figures.dashboard(runs, "fast")
    assert panels(figure) == ["Seconds per step", "Samples in the queue"]
    assert "Seconds a finished rollout is held back: no rollout was held back by fast." not in text(figure)
    assert "no rollout was held back" in figure.layout.meta["alt"]


def test_runs_that_logged_nothing_give_a_sentence() -> None:
    bare = past_run("bare", pd.DataFrame(index=pd.RangeIndex(1, 3, name="global_step")), logged_recipe=False)
    figure = chase_figures.all_runs({"bare": bare})
    assert not figure.data
    assert "perf/step_s: not logged" in text(figure)


def test_one_step_can_be_drawn() -> None:
    run = trainer_bound()
    figure = chase_figures.all_runs({"slow": replace(run, frame=run.frame.iloc[[3]])})
    low, high = figure.layout.xaxis.range
    assert low < 4 < high
    assert all("markers" in trace.mode for trace in figure.data)
    assert all(math.isfinite(end) for end in figure.layout.yaxis.range)
