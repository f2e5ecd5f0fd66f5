"""The two figures that only a run that goes on needs apart: the trainer's wait, and who is held back. See `figures`."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from rlkit import chart
from rlkit.chart import BLUE, ORANGE, VERMILLION, Axis
from rlkit.wording import number, percent


def rollout_wait(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Seconds of every step in which the trainer waits for samples, against the whole step."""
    wait, step = "perf/rollout_wait_s", "perf/step_s"
    figure = chart.blank("Does the trainer wait?", "Seconds per step")
    if chart.nothing_logged(figure, frame, [wait]):
        return figure
    where = chart.x_values(figure, frame, x)
    text = f"The trainer waits {number(frame[wait].mean())} s a step for rollouts"
    if chart.logged(frame, step):
        chart.line(figure, where, frame[step], "step", BLUE, dash="dot", unit=" s")
        both = frame.dropna(subset=[wait, step])
        share = both[wait].sum() / both[step].sum() if len(both) and both[step].sum() > 0 else float("nan")
        text += f", {percent(share)} of the time" if share == share else ""
    chart.line(figure, where, frame[wait], "waiting for rollouts", VERMILLION, unit=" s")
    chart.describe(figure, f"{text}.")
    return figure


def held_back(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Seconds that a finished sample waits for the full queue, and a group to be scored; TRL logs both only then."""
    blocked, scoring = "rollout/backpressure_s", "rollout/score_block_s"
    figure = chart.blank("Is anything held back?", "Seconds")
    rollouts = any(str(name).startswith("rollout/") and chart.logged(frame, str(name)) for name in frame)
    if not chart.logged(frame, blocked) and not chart.logged(frame, scoring):
        chart.say(figure, "No rollout was held back" if rollouts else f"{blocked} and {scoring}: not logged")
        return figure
    where = chart.x_values(figure, frame, x)
    said = []
    for metric, label, colour, dash, words in (
        (blocked, "a finished rollout waits for the queue", BLUE, None, "a full queue held finished rollouts back"),
        (scoring, "a group waits to be scored", ORANGE, "dash", "groups waited to be scored"),
    ):
        if chart.logged(frame, metric):
            chart.line(figure, where, frame[metric], label, colour, markers=True, dash=dash, unit=" s")
            said.append(f"{words} in {int(frame[metric].notna().sum())} of {len(frame)} steps")
    chart.describe(figure, chart.sentence(said))
    return figure
