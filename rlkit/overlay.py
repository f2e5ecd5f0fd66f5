"""What a figure of several runs shows, worked out before anything is drawn: series, their smoothing, their figures.

A panel is one metric, of all runs. Panels are drawn below each other with one x axis, as on a dashboard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from rlkit.chart import Axis, logged, positions
from rlkit.past_run import PastRun
from rlkit.scoreboard import FIGURES, is_simulated
from rlkit.signals import column, settled_steps

# A twentieth of the steps shows the trend of 500 and still moves in a run of 40; fewer than four smooth nothing.
SMOOTHED_PART = 20
LEAST_WINDOW = 4


@dataclass(frozen=True)
class Panel:
    """One metric: what it is called, its unit, and whether its trend is drawn, too.

    A metric that not every step logs (`sparse`) is drawn with a mark a value.
    """

    metric: str
    title: str
    unit: str = ""  # as it follows a number
    smooth: bool = True
    sparse: bool = False


STEP = Panel("perf/step_s", "Seconds per step", " s")
FORWARD_BACKWARD = Panel("perf/fwd_bwd_s", "Seconds of forward and backward", " s")
WAIT = Panel("perf/rollout_wait_s", "Seconds the trainer waits for rollouts", " s")
QUEUE = Panel("sample/rollout_queue_size", "Samples in the queue", " samples")
BACKPRESSURE = Panel("rollout/backpressure_s", "Seconds a finished rollout is held back", " s", False, True)
SAMPLES_PER_ROW = Panel("batch/samples_per_row", "Samples in a row", " samples")
MFU = Panel("perf/mfu_fwd_bwd", "MFU of forward and backward, %", " %")
GENERATED = Panel("rollout/generated_tok_s", "Tokens generated per second", " tok/s")
SYNC = Panel("perf/weight_sync_s", "Seconds of a weight sync", " s", False, True)
STALENESS = Panel("sample/staleness_mean", "Age of the samples, policy versions", " versions")
REWARD = Panel("reward", "Reward")
RATIO = Panel("ratio", "Importance ratio", smooth=False)


@dataclass(frozen=True)
class Series:
    """One run in one panel: where and what, its trend (None: not smoothed), its average after the start.

    The average is the scoreboard's statistic of the metric. `highest` and `highest_trend` say how far a panel must
    reach: a start that waits for the first rollouts would flatten all the rest.
    """

    run: str
    where: pd.Series[float]
    values: pd.Series[float]
    trend: pd.Series[float] | None
    average: float
    highest: float
    highest_trend: float


@dataclass(frozen=True)
class PanelData:
    """A panel's series; runs that did not log it, and simulated ones, for which it does not exist, apart."""

    panel: Panel
    series: list[Series]
    missing: list[str]
    not_simulated: list[str]


# What a simulator has no physics for: its absence is no gap in the log.
WITHOUT_PHYSICS = frozenset({"reward", "reward_std", "ratio", "kl", "entropy"})


def overlay(
    runs: Mapping[str, PastRun], panels: Sequence[Panel], x: Axis = "step", window: int | None = None
) -> list[PanelData]:
    """The panels' series, runs in the order given. `window` (steps) is that of the trend, None: `window_for`."""
    size = window_for(runs) if window is None else window
    found = []
    for panel in panels:
        data = PanelData(panel, [], [], [])
        for name, run in runs.items():
            if logged(run.frame, panel.metric):
                data.series.append(_series(name, run, panel, x, size))
            elif panel.metric in WITHOUT_PHYSICS and is_simulated(run):
                data.not_simulated.append(name)
            else:
                data.missing.append(name)
        found.append(data)
    return found


def window_for(runs: Mapping[str, PastRun]) -> int:
    """Steps that a trend is the mean of: a part of the longest run, and whole rounds of weight syncs.

    A window that cuts a round shows the sync as a ripple. 1, which smooths nothing, for runs too short to have a trend.
    """
    longest = max((len(run.frame) for run in runs.values()), default=0)
    wanted = longest // SMOOTHED_PART
    if longest < 2 * LEAST_WINDOW:
        return 1
    rounds = max((run.recipe.rollout.weight_sync_steps for run in runs.values() if run.recipe), default=1)
    wanted = max(wanted, LEAST_WINDOW)
    return -(-wanted // rounds) * rounds if rounds <= longest // 2 else wanted


def _series(name: str, run: PastRun, panel: Panel, x: Axis, window: int) -> Series:
    values = run.frame[panel.metric].dropna()
    settled = column(settled_steps(run.frame, run.recipe), panel.metric)
    after_start = settled if settled.notna().any() else values
    trend, highest = None, float(after_start.max())
    highest_trend = highest
    if panel.smooth and 1 < window <= len(values):
        trend = _trend(values, window)
        settled_trend = _trend(after_start, window)
        highest_trend = float((settled_trend if len(settled_trend) else trend).max())
    where = positions(run.frame, x)[values.index]
    return Series(name, where, values, trend, _average(panel, after_start), highest, highest_trend)


def _trend(values: pd.Series[float], window: int) -> pd.Series[float]:
    means: pd.Series[float] = values.dropna().rolling(window, min_periods=window).mean().dropna()
    return means


def statistic_of(panel: Panel) -> str:
    """Median or mean: what the scoreboard takes of the metric, else the mean."""
    return next((figure.statistic for figure in FIGURES if figure.metric == panel.metric), "mean")


def _average(panel: Panel, values: pd.Series[float]) -> float:
    return float(values.median() if statistic_of(panel) == "median" else values.mean())
