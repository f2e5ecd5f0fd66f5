"""Figures of several runs, one after the other: what a change did, all runs, reward. Runs in, plotly figures out.

What they show is worked out in `rlkit.overlay`; here it is drawn: panels below each other with one x axis, a run in the
same colour and dash in every figure (`rlkit.run_looks`). The published chase has seven: `dashboard` of its first run,
`change` of the second (packing), third (checkpointing) and fourth (a third replica), `all_runs`,
`reward_by_minutes`, and `reward_and_ratio`. Every figure has its finding in words in `layout.meta["alt"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rlkit import chart, overlay
from rlkit.chart import GREEN, GREY, X_TITLES, Axis
from rlkit.errors import BadInput
from rlkit.figures import RATIO_BAND
from rlkit.overlay import Panel, PanelData, Series
from rlkit.past_run import PastRun
from rlkit.recipe import spelled
from rlkit.run_looks import Look, looks
from rlkit.scoreboard import changes
from rlkit.wording import number

# What to look at, by the part of the recipe that changed; a field belongs to the first that names it.
TOPICS: tuple[tuple[tuple[str, ...], tuple[Panel, ...]], ...] = (
    (
        ("train.token_budget", "train.gradient_accumulation_steps", "train.per_device_train_batch_size"),
        (overlay.STEP, overlay.MFU, overlay.SAMPLES_PER_ROW, overlay.QUEUE),
    ),
    (("train.gradient_checkpointing", "train."), (overlay.FORWARD_BACKWARD, overlay.WAIT, overlay.QUEUE)),
    (("serve.",), (overlay.GENERATED, overlay.WAIT, overlay.SYNC)),
    (("rollout.weight_sync_steps", "transport."), (overlay.SYNC, overlay.STEP)),
    (
        ("rollout.max_inflight_tasks", "rollout.", "cap."),
        (overlay.GENERATED, overlay.QUEUE, overlay.WAIT, overlay.STALENESS),
    ),
)
ANY_CHANGE = (overlay.STEP, overlay.WAIT, overlay.QUEUE)
MOST_PANELS = 4  # more do not fit a screen

# px
_PANEL, _GAP, _TOP, _BOTTOM = 128, 46, 96, 52
_NAME = 24  # px: a panel's name above it, and below the legend
_ROOM = 1.08  # above the highest value, so that no line runs along the edge
_MANY = 200  # markers of full size would hide each other
# With more runs than this, every step of each would hide their trends.
_MOST_RAW = 2
_CHANGES_IN_TITLE = 2


def dashboard(runs: Mapping[str, PastRun], name: str, x: Axis = "step", window: int | None = None) -> go.Figure:
    """One run as its dashboard shows it: step and forward+backward, queue against its size, backpressure (figure 1)."""
    only = {name: runs[name]}
    panels = (overlay.STEP, overlay.FORWARD_BACKWARD, overlay.QUEUE, overlay.BACKPRESSURE)
    step, busy, queue, held = overlay.overlay(only, panels, x, window)
    drawn = _Stack(f"What does the dashboard of {name} show?", looks(runs), only, x, window)
    drawn.panel(step, also=busy)
    drawn.panel(queue, limits=_queue_sizes(only))
    drawn.panel(held)
    return drawn.figure()


def change(runs: Mapping[str, PastRun], name: str, x: Axis = "step", window: int | None = None) -> go.Figure:
    """A run over the one before it, with the panels that its change is about (figures 2 to 4). Raises BadInput."""
    order = list(runs)
    place = order.index(name)
    if place == 0:
        raise BadInput(f"{name}: is the first run, nothing changed before it")
    pair = {one: runs[one] for one in order[place - 1 : place + 1]}
    drawn = _Stack(_question(pair), looks(runs), pair, x, window)
    for data in overlay.overlay(pair, _panels(pair), x, window):
        drawn.panel(data, limits=_queue_sizes(pair) if data.panel == overlay.QUEUE else {})
    return drawn.figure()


def all_runs(runs: Mapping[str, PastRun], x: Axis = "step", window: int | None = None) -> go.Figure:
    """All runs in one figure: step, queue, wait, and generation (figure 5)."""
    drawn = _Stack("How did it go from run to run?", looks(runs), runs, x, window)
    panels = (overlay.STEP, overlay.QUEUE, overlay.WAIT, overlay.GENERATED)
    for data in overlay.overlay(runs, panels, x, window):
        drawn.panel(data)
    return drawn.figure()


def reward_by_minutes(runs: Mapping[str, PastRun], window: int | None = None) -> go.Figure:
    """Reward against the minutes it took (figure 6); a simulated run has none, and the figure says so."""
    drawn = _Stack("How long does the same reward take?", looks(runs), runs, "minutes", window)
    for data in overlay.overlay(_with_clock(runs), (overlay.REWARD,), "minutes", window):
        drawn.panel(data)
    return drawn.figure()


def reward_and_ratio(runs: Mapping[str, PastRun], x: Axis = "step", window: int | None = None) -> go.Figure:
    """Reward and importance ratio (figure 7): whether speed was bought with learning."""
    drawn = _Stack("Does it learn as well?", looks(runs), runs, x, window)
    reward, ratio = overlay.overlay(runs, (overlay.REWARD, overlay.RATIO), x, window)
    drawn.panel(reward)
    drawn.panel(ratio, band=RATIO_BAND)
    return drawn.figure()


class _Stack:
    """A figure that panels are added to, from top to bottom."""

    def __init__(
        self, title: str, look: Mapping[str, Look], runs: Mapping[str, PastRun], x: Axis, window: int | None
    ) -> None:
        self._title, self._look, self._x = title, look, x
        self._window = overlay.window_for(runs) if window is None else window
        self._rows: list[tuple[PanelData, PanelData | None, Mapping[str, float], tuple[float, float] | None]] = []
        self._named: set[str] = set()

    def panel(
        self,
        data: PanelData,
        also: PanelData | None = None,
        limits: Mapping[str, float] | None = None,
        band: tuple[float, float] | None = None,
    ) -> None:
        """Add a panel; `also` is a second metric of one run in it, `limits` are lines by what they are called."""
        self._rows.append((data, also, limits or {}, band))

    def figure(self) -> go.Figure:
        """The figure of all panels that have something to show, the others named below the title."""
        shown = [row for row in self._rows if row[0].series]
        figure = chart.blank(self._title, "")
        if not shown:
            self._nothing(figure)
            return figure
        height = _TOP + len(shown) * _PANEL + (len(shown) - 1) * _GAP + _BOTTOM
        inner = height - _TOP - _BOTTOM
        figure.update_layout(height=height, hoversubplots="axis", margin={"t": _TOP, "b": _BOTTOM})
        figure.update_layout(legend={"y": 1 + _NAME / inner})
        look = figure.layout.yaxis.to_plotly_json()
        for place, (data, also, limits, band) in enumerate(shown):
            top = 1 - place * (_PANEL + _GAP) / inner
            axis = "y" if place == 0 else f"y{place + 1}"
            reach = {"range": _reach([data, also] if also else [data], limits, band)}
            settings = look | {"domain": [max(0.0, top - _PANEL / inner), top], "title": None, "nticks": 5} | reach
            figure.update_layout({f"yaxis{axis[1:]}": settings})
            self._name(figure, data, axis)
            self._lines(figure, data, also, axis)
            self._bounds(figure, limits, band, axis)
        last = f"y{len(shown)}" if len(shown) > 1 else "y"
        main = [row[0] for row in shown]
        figure.update_xaxes(title={"text": self._x_title(main)}, anchor=last, range=_span(main))
        chart.describe(figure, self._words(shown))
        return figure

    def _name(self, figure: go.Figure, data: PanelData, axis: str) -> None:
        text, absent = f"<b>{data.panel.title}</b>", _absent(data)
        drawn = [series.values if series.trend is None or _with_raw(data) else series.trend for series in data.series]
        beyond = max(float(values.max()) for values in drawn)
        if beyond > _reach([data], {}, None)[1]:
            text += f"  at the start up to {number(beyond)}"
        text += f"  <i>{absent}</i>" if absent else ""
        place = {"xref": "x domain", "x": 0, "xanchor": "left", "yref": f"{axis} domain", "y": 1, "yanchor": "bottom"}
        figure.add_annotation(text=text, showarrow=False, font={"size": 12}, yshift=4, align="left", **place)

    def _x_title(self, shown: Sequence[PanelData]) -> str:
        smoothed = [data for data in shown if any(series.trend is not None for series in data.series)]
        if not smoothed:
            return X_TITLES[self._x]
        lines = "thick lines" if all(map(_with_raw, smoothed)) else "lines"
        return f"{X_TITLES[self._x]} ({lines}: mean of the last {self._window} steps)"

    def _lines(self, figure: go.Figure, data: PanelData, also: PanelData | None, axis: str) -> None:
        for series in data.series:
            look = self._look[series.run]
            self._line(figure, series, data, look, axis, series.run, _with_raw(data))
        for series in also.series if also is not None else []:
            self._line(
                figure, series, also or data, Look(GREEN, "dot", "circle"), axis, "of it forward and backward", False
            )

    def _line(
        self, figure: go.Figure, series: Series, data: PanelData, look: Look, axis: str, name: str, raw: bool
    ) -> None:
        panel, trend = data.panel, series.trend
        first = name not in self._named
        self._named.add(name)
        shared = {"yaxis": axis, "legendgroup": name, "name": name, "hovertemplate": f"%{{y:.4~g}}{panel.unit}"}
        if trend is not None and raw:
            thin = {"color": look.colour, "width": 1}
            each = shared | {"opacity": 0.4, "line": thin, "hoverinfo": "skip", "hovertemplate": None}
            figure.add_trace(go.Scatter(**_xy(series.where, series.values), mode="lines", showlegend=False, **each))
        values = series.values if trend is None else trend
        points = panel.sparse or len(values) < 2
        width = 2.5 if trend is not None else 0.75 if panel.sparse else 1.5
        figure.add_trace(
            go.Scatter(
                **_xy(series.where[values.index], values),
                mode="lines+markers" if points else "lines",
                line={"color": look.colour, "dash": look.dash, "width": width},
                marker={"size": 4 if len(values) <= _MANY else 3, "color": look.colour, "symbol": look.symbol},
                showlegend=first,
                **shared,
            )
        )

    def _bounds(
        self, figure: go.Figure, limits: Mapping[str, float], band: tuple[float, float] | None, axis: str
    ) -> None:
        across = {"xref": "x domain", "yref": axis, "x0": 0, "x1": 1}
        for label, value in limits.items():
            line = {"color": GREY, "width": 1.5, "dash": "dot"}
            figure.add_shape(type="line", y0=value, y1=value, line=line, **across)
            place = {"xref": "x domain", "x": 1, "xanchor": "right", "yref": axis, "y": value, "yanchor": "bottom"}
            figure.add_annotation(text=label, showarrow=False, font={"size": 11}, **place)
        if band is not None:
            low, high = band
            figure.add_shape(
                type="rect", y0=low, y1=high, fillcolor=GREEN, opacity=0.15, line_width=0, layer="below", **across
            )

    def _words(self, shown: Sequence[tuple[PanelData, PanelData | None, Mapping[str, float], object]]) -> str:
        said = []
        for data, also, _, _ in shown:
            for one in (data, also) if also is not None else (data,):
                averages = ", ".join(f"{series.run} {number(series.average)}" for series in one.series)
                said.append(f"{one.panel.title} ({overlay.statistic_of(one.panel)}): {averages}.")
        said += [f"{data.panel.title}: {_absent(data)}." for data, *_ in self._rows if _absent(data)]
        return f"After the start. {' '.join(said)}"

    def _nothing(self, figure: go.Figure) -> None:
        told = "; ".join(f"{data.panel.metric}: {_absent(data, alone=True)}" for data, *_ in self._rows)
        chart.say(figure, told)
        chart.describe(figure, f"{told}.")


def _with_raw(data: PanelData) -> bool:
    return len(data.series) <= _MOST_RAW


def _absent(data: PanelData, alone: bool = False) -> str:
    """Who has no line here and why; `alone`: when nobody has, without the runs' names."""
    said = []
    if data.not_simulated:
        of = "" if alone and not data.missing else f" of {', '.join(data.not_simulated)}"
        said.append(f"not simulated{of}, it has no physics")
    if data.missing:
        held = data.panel == overlay.BACKPRESSURE
        what = "no rollout was held back" if held else "not logged"
        said.append(what if alone and not data.not_simulated else f"{what} by {', '.join(data.missing)}")
    return "; ".join(said)


def _panels(pair: Mapping[str, PastRun]) -> list[Panel]:
    before, after = pair.values()
    found: list[Panel] = []
    for name, _, _ in changes(before, after) or []:
        topic = next((panels for prefixes, panels in TOPICS if name.startswith(prefixes)), ())
        found += [panel for panel in topic if panel not in found]
    return (found or list(ANY_CHANGE))[:MOST_PANELS]


def _question(pair: Mapping[str, PastRun]) -> str:
    before, after = pair.values()
    fields = [change for change in changes(before, after) or [] if not change[0].startswith("hardware.")]
    if not 1 <= len(fields) <= _CHANGES_IN_TITLE:
        return f"What changed from {' to '.join(pair)}?"
    return f"What did {' and '.join(f'{name} {spelled(old)} → {spelled(new)}' for name, old, new in fields)} change?"


def _reach(panels: Sequence[PanelData], limits: Mapping[str, float], band: tuple[float, float] | None) -> list[float]:
    """The ends of a y axis: from 0 over all that comes after the start, or around a band."""
    series = [one for data in panels for one in data.series]
    tops = [one.highest if _with_raw(data) else one.highest_trend for data in panels for one in data.series]
    if band is not None:
        low = min([band[0], *(float(one.values.min()) for one in series)])
        high = max([band[1], *(float(one.values.max()) for one in series)])
        room = (high - low) * (_ROOM - 1)
        return [low - room, high + room]
    return [0.0, _ROOM * max([*tops, *limits.values()]) or 1.0]


def _span(panels: Sequence[PanelData]) -> list[float]:
    """The ends of the x axis, with room for the first and the last marker."""
    series = [one for data in panels for one in data.series]
    first = min(float(one.where.min()) for one in series)
    last = max(float(one.where.max()) for one in series)
    room = (last - first) / 80 or 0.5
    return [first - room, last + room]


def _queue_sizes(runs: Mapping[str, PastRun]) -> dict[str, float]:
    sizes = {run.recipe.rollout.queue_maxsize for run in runs.values() if run.recipe is not None}
    return {f"queue_maxsize {size}": float(size) for size in sorted(sizes)}


def _with_clock(runs: Mapping[str, PastRun]) -> dict[str, PastRun]:
    return {name: run for name, run in runs.items() if chart.logged(run.frame, "timestamp")}


def _xy(where: pd.Series[float], values: pd.Series[float]) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Seven digits are more than a pixel shows, and half the size of a page with five runs of 500 steps."""
    return {"x": where.to_numpy(dtype=np.float32), "y": values.to_numpy(dtype=np.float32)}
