"""One metric of several runs in one chart."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from rlkit import chart
from rlkit.chart import BLUE, GREEN, PURPLE, VERMILLION
from rlkit.wording import number

# Told apart by their dash, too, where colours are not seen.
_LOOKS = ((VERMILLION, "dash"), (PURPLE, "dot"), (GREEN, "dashdot"), (BLUE, None))


def compare(frames: Mapping[str, pd.DataFrame], metric: str, title: str, y_title: str) -> go.Figure:
    """A line a run (up to four), by optimizer step; a run that never logged the metric is named as missing.

    Frames as `rlkit.tracking.Run` has them; steps between two readings of a gauge are bridged.
    """
    figure = chart.blank(title, y_title)
    logged = {name: frame for name, frame in frames.items() if chart.logged(frame, metric)}
    if not logged:
        chart.say(figure, f"{metric}: not logged")
        return figure
    chart.x_values(figure, max(logged.values(), key=len), "step")
    said = []
    for (name, frame), (colour, dash) in zip(frames.items(), _LOOKS, strict=False):
        if name in logged:
            values = frame[metric].dropna()
            where = pd.Series(values.index.to_numpy(dtype=float), index=values.index)
            chart.line(figure, where, values, name, colour, dash=dash)
            said.append(f"{name} {number(values.mean())}")
    chart.describe(figure, f"{y_title}, mean over the steps: {', '.join(said)}.")
    chart.note_missing(figure, [f"{metric} of {name}" for name in frames if name not in logged])
    return figure
