from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from rlkit.pace import logged_minutes, logged_steps, mean_step_s, run_minutes
from rlkit.recipe import load_recipe

# A sync every four steps.
CHASE = load_recipe(Path(__file__).parents[1] / "runs" / "published" / "r1-dp2.yaml")


def log(steps: int, every: int = 4) -> pd.DataFrame:
    """Steps of 5 s, with a sync of 8 s on top after each fourth."""
    numbers = range(1, steps + 1)
    syncs = [8.0 if number % every == 0 else None for number in numbers]
    return pd.DataFrame(
        {"perf/step_s": [5.0 + (sync or 0.0) for sync in syncs], "perf/weight_sync_s": syncs, "perf/fwd_bwd_s": 4.0},
        index=pd.Index(numbers, name="global_step"),
    )


@pytest.mark.parametrize("steps", [20, 21, 22, 23])
def test_a_mean_step_has_its_share_of_the_syncs_however_many_were_logged(steps: int) -> None:
    assert mean_step_s(log(steps), CHASE) == pytest.approx(7.0)


def test_a_whole_run_is_as_long_as_it_was() -> None:
    frame = log(40)
    assert run_minutes(frame, CHASE, 40) == pytest.approx(frame["perf/step_s"].sum() / 60)


def test_a_short_run_is_extended_by_mean_steps() -> None:
    assert run_minutes(log(40), CHASE, 500) == pytest.approx(500 * 7.0 / 60)


def test_phases_are_added_up_where_no_step_is_timed() -> None:
    frame = log(20).drop(columns="perf/step_s").assign(**{"perf/rollout_wait_s": 0.5})
    assert mean_step_s(frame, CHASE) == pytest.approx(4.5 + 2.0)


def test_nothing_is_said_of_a_log_without_times() -> None:
    frame = log(20)[["perf/weight_sync_s"]]
    assert mean_step_s(frame, CHASE) is None
    assert run_minutes(frame, CHASE, 500) is None


def test_a_row_for_every_few_steps_counts_for_all_of_them() -> None:
    frame = log(200).iloc[9::10]
    assert mean_step_s(frame, CHASE) == pytest.approx(frame["perf/step_s"].iloc[1:].mean())
    assert run_minutes(frame, CHASE, 200) == pytest.approx(frame["perf/step_s"].mean() * 200 / 60, rel=0.1)


def test_the_first_step_takes_its_phases_and_the_sync_before_it() -> None:
    frame = log(20).assign(**{"perf/rollout_wait_s": 0.5})
    frame.loc[1, ["perf/step_s", "perf/weight_sync_s"]] = [float("nan"), 120.0]
    assert logged_minutes(frame, CHASE) == pytest.approx((frame["perf/step_s"].sum() + 4.0 + 0.5 + 120.0) / 60)


def test_a_stopped_run_took_what_it_took_until_then() -> None:
    stopped = log(40).head(23)
    assert logged_steps(stopped) == 23
    assert logged_minutes(stopped, CHASE) == pytest.approx(stopped["perf/step_s"].sum() / 60)
    assert logged_minutes(stopped, None) == logged_minutes(stopped, CHASE)


def test_time_between_two_processes_of_a_run_is_none_of_its_steps() -> None:
    frame = log(40)
    clock = pd.Timestamp("2026-01-05", tz="UTC") + pd.to_timedelta(frame["perf/step_s"].cumsum(), unit="s")
    overnight = clock.where(frame.index < 20, clock + pd.Timedelta(hours=9))
    assert logged_minutes(frame.assign(timestamp=overnight), CHASE) == logged_minutes(frame, CHASE)


def test_steps_whose_rows_are_lost_count_as_mean_ones() -> None:
    frame = log(40).drop(index=range(11, 19))
    assert logged_steps(frame) == 40
    assert logged_minutes(frame, CHASE) == pytest.approx(40 * 7.0 / 60, rel=0.01)


def test_nothing_took_no_time_that_is_known() -> None:
    assert logged_minutes(log(0), CHASE) is None
    assert logged_steps(log(0)) == 0
