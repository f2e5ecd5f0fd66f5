"""Figures are read back from plotly's own objects: what is drawn, where, and what is said about it."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from recorded_runs import recipe, recorded

from rlkit import chart, figures
from rlkit.errors import BadInput

ALL: dict[str, Callable[[pd.DataFrame], go.Figure]] = {
    "step_time": figures.step_time,
    "queue": lambda frame: figures.queue(frame, recipe()),
    "waiting": figures.waiting,
    "in_flight": lambda frame: figures.in_flight(frame, recipe()),
    "staleness": lambda frame: figures.staleness(frame, recipe()),
    "reward": figures.reward,
    "ratio": figures.ratio,
    "mfu": figures.mfu,
}
NOTHING = pd.DataFrame({"other": [1.0, 2.0]}, index=pd.Index([1, 2], name="global_step"))


def lines(figure: go.Figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def limits(figure: go.Figure) -> list[float]:
    drawn = [trace for trace in figure.data if trace.hoverinfo == "skip"]
    assert all(tuple(trace.x) == figure.layout.xaxis.range and trace.y[0] == trace.y[1] for trace in drawn)
    return [trace.y[0] for trace in drawn]


def notes(figure: go.Figure) -> str:
    return " ".join(annotation.text for annotation in figure.layout.annotations)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("run", ["learning-run", "trainer-bound-run"])
def test_every_figure_has_words_titles_units_and_safe_colours(name: str, run: str) -> None:
    figure = ALL[name](recorded(run))
    assert re.search(r"\d.*\.$", figure.layout.meta["alt"])  # a sentence with a number in it
    assert "nan" not in figure.layout.meta["alt"]
    assert figure.layout.title.text.endswith("?")
    assert figure.layout.xaxis.title.text == "Optimizer step"
    assert figure.layout.yaxis.title.text
    palette = {chart.BLUE, chart.VERMILLION, chart.GREEN, chart.PURPLE, chart.ORANGE, chart.SKY, chart.GREY}
    for trace in figure.data:
        assert trace.line.color in palette
        if trace.line.color in (chart.ORANGE, chart.SKY):
            assert trace.line.dash or "markers" in trace.mode


@pytest.mark.parametrize("name", ALL)
def test_a_metric_that_was_never_logged_is_named_in_the_figure(name: str) -> None:
    figure = ALL[name](NOTHING)
    assert not figure.data
    assert "not logged" in notes(figure)
    assert "not logged" in figure.layout.meta["alt"]


@pytest.mark.parametrize("name", ALL)
def test_a_run_of_one_step_can_be_drawn(name: str) -> None:
    frame = recorded("trainer-bound-run").iloc[[3]]
    figure = ALL[name](frame)
    low, high = figure.layout.xaxis.range
    assert low < frame.index[0] < high
    assert all("markers" in trace.mode for trace in figure.data if trace.hoverinfo != "skip")


@pytest.mark.parametrize("name", ALL)
def test_only_nan_counts_as_not_logged(name: str) -> None:
    frame = recorded("learning-run").drop(columns="timestamp") * math.nan
    assert "not logged" in notes(ALL[name](frame))


def test_every_public_function_is_tested_above() -> None:
    drawing = {
        name
        for name, function in inspect.getmembers(figures, inspect.isfunction)
        if inspect.signature(function).return_annotation == "go.Figure" and not name.startswith("_")
    }
    assert drawing == {*ALL, "routing"}


def test_phases_of_every_step_add_up_to_its_time() -> None:
    frame = recorded("learning-run")
    parts = figures.phase_seconds(frame)
    assert list(parts) == [name for name, *_ in figures.PHASES]
    np.testing.assert_allclose(parts.sum(axis=1, skipna=False)[1:], frame["perf/step_s"][1:], rtol=1e-4)
    assert math.isnan(parts["other"].iloc[0])  # no perf/step_s at the first step
    stacked = sum(trace.y for trace in figures.step_time(frame).data)
    np.testing.assert_allclose(stacked, frame["perf/step_s"][1:], rtol=1e-4)


def test_a_weight_sync_every_fourth_step_stays_a_spike() -> None:
    frame = recorded("learning-run")
    frame.loc[frame.index % 4 != 0, "perf/weight_sync_s"] = math.nan
    trace = lines(figures.step_time(frame))["weight sync"]
    assert trace.line.shape == "hvh"
    assert [value > 0 for value in trace.y[:8]] == [step % 4 == 0 for step in range(2, 10)]


def test_timers_that_overlap_by_rounding_leave_no_negative_remainder() -> None:
    frame = pd.DataFrame({"perf/step_s": [1.0], "perf/fwd_bwd_s": [1.0004]}, index=pd.Index([2], name="global_step"))
    assert figures.phase_seconds(frame)["other"].tolist() == [0.0]


def test_step_time_says_the_shares_and_names_the_missing_phase() -> None:
    frame = recorded("trainer-bound-run")
    assert "forward + backward 88 %" in figures.step_time(frame).layout.meta["alt"]
    figure = figures.step_time(frame.drop(columns="perf/weight_sync_s"))
    assert "weight sync" not in lines(figure)
    assert "perf/weight_sync_s: not logged" in notes(figure)


def test_queue_is_compared_with_its_size_and_with_what_a_full_queue_reads() -> None:
    frame = recorded("trainer-bound-run")
    figure = figures.queue(frame, recipe())
    assert limits(figure) == [256, 256 - 64 / 2]
    assert "of its size (256)" in figure.layout.meta["alt"]
    np.testing.assert_array_equal(lines(figure)["queue"].y, frame["sample/rollout_queue_size"])


def test_reading_of_a_full_queue_is_left_out_when_a_step_is_larger_than_the_queue_or_unknown() -> None:
    frame = recorded("trainer-bound-run")
    assert limits(figures.queue(frame, recipe(queue_maxsize=16))) == [16]
    assert limits(figures.queue(frame.drop(columns="batch/samples_per_step"), recipe())) == [256]


def test_limits_come_from_the_recipe_and_are_left_out_without_one() -> None:
    frame = recorded("learning-run")
    assert limits(figures.in_flight(frame, recipe())) == [64]
    assert limits(figures.staleness(frame, recipe(max_staleness=7))) == [7]
    for figure in (figures.queue(frame), figures.in_flight(frame), figures.staleness(frame)):
        assert limits(figure) == []
        assert figure.data


def test_a_cap_below_the_limit_is_shown_with_what_it_admits() -> None:
    frame = recorded("learning-run")
    assert (
        len(
            figures.in_flight(
                frame.assign(**{"rollout/inflight_cap": 64.0, "rollout/inflight_admitted": 64.0}), recipe()
            ).data
        )
        == 2
    )
    frame["rollout/inflight_cap"] = [10.0, 20.0] * (len(frame) // 2)
    frame["rollout/inflight_admitted"] = [12.0, float("nan")] * (len(frame) // 2)
    figure = figures.in_flight(frame, recipe())
    assert [trace.name for trace in figure.data] == ["in flight", "max_inflight_tasks 64", "admitted", "cap"]
    assert len(figure.data[2].x) == len(frame) // 2
    assert "the admission cap of 10 to 20 lets through 12 of them" in figure.layout.meta["alt"]


def test_automatic_in_flight_limit_is_trls_own_formula() -> None:
    figure = figures.in_flight(recorded("learning-run"), recipe(max_inflight_tasks=-1))
    assert limits(figure) == [4 * 4]  # max_staleness x (one sample per device x four accumulated)


def test_waiting_keeps_backpressure_sparse_and_counts_the_blocked_steps() -> None:
    frame = recorded("trainer-bound-run")
    figure = figures.waiting(frame)
    blocked = lines(figure)["a blocked rollout waits for the queue"]
    assert np.isnan(blocked.y).sum() == frame["rollout/backpressure_s"].isna().sum() == 1
    assert "13 of 14 steps" in figure.layout.meta["alt"]
    quiet = figures.waiting(recorded("learning-run"))
    assert "rollout/backpressure_s: not logged" in notes(quiet)
    assert "no rollout was held back" in quiet.layout.meta["alt"]
    waits_alone = recorded("learning-run")[["perf/rollout_wait_s"]]
    assert "held back" not in figures.waiting(waits_alone).layout.meta["alt"]


def test_staleness_tells_how_many_samples_were_dropped() -> None:
    assert "503 samples were dropped" in figures.staleness(recorded("trainer-bound-run")).layout.meta["alt"]
    assert "none was dropped" in figures.staleness(recorded("learning-run")).layout.meta["alt"]


def test_reward_is_shown_raw_and_smoothed_with_the_window_in_the_label() -> None:
    frame = recorded("learning-run")
    drawn = lines(figures.reward(frame, window=7))
    np.testing.assert_array_equal(drawn["each step"].y, frame["reward"])
    smooth = drawn["mean of the last 7 steps"].y
    assert np.isnan(smooth[:6]).all()
    assert smooth[6] == pytest.approx(frame["reward"].iloc[:7].mean())


def test_reward_of_a_run_shorter_than_the_window_is_shown_raw() -> None:
    assert list(lines(figures.reward(recorded("learning-run").iloc[:3]))) == ["each step"]


def test_reward_says_what_the_first_and_the_last_quarter_had() -> None:
    frame = pd.DataFrame({"reward": [0.1, 0.2, 0.3, 0.9]}, index=pd.RangeIndex(1, 5, name="global_step"))
    assert (
        "0.100 in the first quarter of the steps, 0.900 in the last (+0.800)"
        in figures.reward(frame).layout.meta["alt"]
    )


@pytest.mark.parametrize(("values", "inside"), [([0.995, 1.0, 1.009], 3), ([0.95, 1.0, 1.3], 1)])
def test_ratio_shows_the_band_and_counts_the_steps_in_it(values: list[float], inside: int) -> None:
    figure = figures.ratio(pd.DataFrame({"ratio": values}, index=pd.RangeIndex(1, 4, name="global_step")))
    band = next(shape for shape in figure.layout.shapes if shape.type == "rect")
    assert (band.y0, band.y1) == (0.99, 1.01) == figures.RATIO_BAND
    assert f"in {inside} of 3 steps" in figure.layout.meta["alt"]
    low, high = figure.layout.yaxis.range
    assert low < min(0.99, *values)
    assert high > max(1.01, *values)


def test_mfu_says_what_is_left_of_it_over_the_whole_step() -> None:
    assert "keeps 87 %" in figures.mfu(recorded("trainer-bound-run")).layout.meta["alt"]
    only = figures.mfu(recorded("learning-run").drop(columns="perf/mfu_wall_clock"))
    assert list(lines(only)) == ["forward + backward"]
    assert "perf/mfu_wall_clock: not logged" in notes(only)


@pytest.mark.parametrize("name", ["step_time", "waiting", "reward", "ratio", "mfu"])
def test_x_can_be_minutes_since_the_first_step(name: str) -> None:
    frame = recorded("learning-run")
    figure = getattr(figures, name)(frame, x="minutes")
    assert figure.layout.xaxis.title.text == "Minutes since the first logged step"
    elapsed = (frame["timestamp"].iloc[-1] - frame["timestamp"].iloc[0]).total_seconds() / 60
    assert figure.data[0].x[-1] == pytest.approx(elapsed)


def test_minutes_need_timestamps_and_nothing_else_is_an_axis() -> None:
    frame = recorded("learning-run")
    with pytest.raises(BadInput, match="timestamp"):
        figures.mfu(frame.drop(columns="timestamp"), x="minutes")
    with pytest.raises(BadInput, match="'hours'"):
        figures.mfu(frame, x="hours")  # type: ignore[arg-type]


# The published totals of the first of the five runs.
PUBLISHED = {
    "routed": 64728,
    "affinity": 54712,
    "spilled": 820,
    "unmatched": 9196,
    "round_robin": 0,
    "per_replica": [{"routed": 31928}, {"routed": 32800}],
}


def test_routing_stacks_the_decisions_beside_the_load_of_each_replica() -> None:
    figure = figures.routing(PUBLISHED)
    drawn = lines(figure)
    assert list(drawn) == ["affinity", "spilled", "unmatched", "routed"]
    assert list(drawn["affinity"].y) == ["all", "replica 0", "replica 1"]
    assert list(drawn["affinity"].x) == [54712, 0, 0]
    assert list(drawn["routed"].x) == [0, 31928, 32800]
    assert "64,728 requests were routed: affinity 85 %, spilled 1 %, unmatched 14 %" in figure.layout.meta["alt"]
    assert "Per replica: 49 %, 51 %" in figure.layout.meta["alt"]


def test_routing_shows_the_decisions_of_each_replica_where_they_are_counted() -> None:
    one = {"routed": 10, "affinity": 7, "unmatched": 3}
    figure = figures.routing(one | {"per_replica": [{"routed": 6, "affinity": 4, "unmatched": 2}, {"routed": 4}]})
    assert {name: list(trace.x) for name, trace in lines(figure).items()} == {
        "affinity": [7, 4, 0],
        "unmatched": [3, 2, 0],
        "routed": [0, 0, 4],
    }


@pytest.mark.parametrize("proxy", [{}, {"routed": 0, "per_replica": [{"routed": 0}]}])
def test_routing_without_requests_says_so(proxy: dict[str, Any]) -> None:
    figure = figures.routing(proxy)
    assert not figure.data
    assert "none counted" in notes(figure)


def test_a_simulated_run_says_that_it_has_no_reward() -> None:
    frame = recorded("learning-run").drop(columns="reward")
    simulated = figures.reward(frame, recipe=recipe().with_overrides(["engine=sim"]))
    assert "it has no physics" in str(simulated.layout.annotations)
    assert "not logged" in str(figures.reward(frame, recipe=recipe()).layout.annotations)
