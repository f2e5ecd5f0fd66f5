"""The look of every figure: colours, a blank chart, lines, limits, and what a chart says when a metric is missing."""

from __future__ import annotations

from typing import Literal

import pandas as pd
import plotly.graph_objects as go

from rlkit.errors import BadInput

Axis = Literal["step", "minutes"]

# Okabe and Ito's palette (2008), told apart with every common colour blindness; its yellow is too faint on white.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"  # close to vermillion and blue in greyscale: only with a dash, a marker or a fill
GREY = "#8A8F98"  # limits and remainders

X_TITLES: dict[Axis, str] = {"step": "Optimizer step", "minutes": "Minutes since the first logged step"}

_HEIGHT = 340  # px: two figures to a printed page, with their captions
_EMPTY_HEIGHT = 150  # px: nothing to see, one line to read
_MANY_POINTS = 200  # closer together than this many, markers of full size hide the line
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK, _GRID = "#24292f", "#e4e7eb"


def blank(title: str, y_title: str) -> go.Figure:
    """A chart without traces: title, y axis (from 0) with its unit, legend above, one hover label for all lines."""
    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": GREY, "tickcolor": GREY}
    named = {"font": {"size": 13}, "standoff": 10}
    return go.Figure(
        layout={
            "template": "none",
            "height": _HEIGHT,
            "title": {"text": title, "font": {"size": 16, "weight": 600}, "pad": {"t": 8}}
            | {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"},
            "font": {"family": _FONT, "size": 13, "color": _INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "margin": {"l": 64, "r": 12, "t": 68, "b": 52},
            "legend": {"orientation": "h", "traceorder": "normal", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "showlegend": True,
            "hovermode": "x unified",
            "xaxis": axis | {"showgrid": False, "ticks": "outside", "title": named},
            "yaxis": axis | {"rangemode": "tozero", "title": named | {"text": y_title}},
            "meta": {"alt": title},
        }
    )


def line(
    figure: go.Figure,
    where: pd.Series[float],
    values: pd.Series[float],
    label: str,
    colour: str,
    *,
    unit: str = "",
    fill: bool = False,
    markers: bool = False,
    dash: str | None = None,
    shape: str = "linear",
    width: float = 2.0,
) -> None:
    """Add one named line, or one layer of the stack (`fill`); gaps in `values` stay gaps."""
    # A single point has no line to show.
    points = markers or int(values.notna().sum()) < 2
    figure.add_trace(
        go.Scatter(
            x=where.to_numpy(),
            y=values.to_numpy(),
            name=label,
            mode="lines+markers" if points else "lines",
            line={"color": colour, "width": 0 if fill else width, "dash": dash, "shape": shape},
            marker={"size": 5 if len(values) <= _MANY_POINTS else 3, "color": colour},
            fillcolor=colour if fill else None,
            stackgroup="phases" if fill else None,
            hovertemplate=f"%{{y:.4~g}}{unit}",
        )
    )


def limit(figure: go.Figure, value: float, label: str, *, dash: str = "dash") -> None:
    """Add a horizontal line across the x axis (after `x_values`), named in the legend: nothing can hide its label."""
    figure.add_trace(
        go.Scatter(
            x=list(figure.layout.xaxis.range),
            y=[value, value],
            name=label,
            mode="lines",
            line={"color": GREY, "width": 1.5, "dash": dash},
            hoverinfo="skip",
        )
    )


def x_values(figure: go.Figure, frame: pd.DataFrame, x: Axis) -> pd.Series[float]:
    """Where each row of `frame` stands on the x axis, which gets its title here. Raises BadInput for another `x`."""
    values = positions(frame, x)
    # The same span in every figure, whether it has markers or not, so that they can be read below each other.
    first, last = values.min(), values.max()
    room = (last - first) / 80 or 0.5
    whole = x == "step" and last - first < 10  # few steps: no ticks between them
    figure.update_xaxes(title={"text": X_TITLES[x]}, range=[first - room, last + room], dtick=1 if whole else None)
    return values


def positions(frame: pd.DataFrame, x: Axis) -> pd.Series[float]:
    """Where each row of `frame` stands: its step, or the minutes since the first one. Raises BadInput."""
    if x == "step":
        return pd.Series(frame.index.to_numpy(dtype=float), index=frame.index)
    if x != "minutes":
        raise BadInput(f"x: expected step or minutes, got {x!r}")
    if not logged(frame, "timestamp"):
        raise BadInput("x: minutes needs the frame's timestamp column, use step")
    minutes: pd.Series[float] = (frame["timestamp"] - frame["timestamp"].min()).dt.total_seconds() / 60
    return minutes


def nothing_logged(figure: go.Figure, frame: pd.DataFrame, metrics: list[str]) -> bool:
    """True, and the figure says so, when none of `metrics` was ever logged."""
    if any(logged(frame, metric) for metric in metrics):
        return False
    say(figure, f"{' and '.join(metrics)}: not logged")
    return True


def say(figure: go.Figure, text: str) -> None:
    """Make the chart one line of text: there is nothing to draw."""
    figure.add_annotation(text=text, x=0, y=0.5, xref="paper", yref="paper", xanchor="left", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.update_layout(height=_EMPTY_HEIGHT)
    describe(figure, f"{text} in this run.")


def note_missing(figure: go.Figure, metrics: list[str]) -> None:
    """Name the metrics that are missing from a chart that shows others."""
    if not metrics:
        return
    text = f"{', '.join(metrics)}: not logged"
    figure.add_annotation(
        text=text, x=1, y=1.02, xref="paper", yref="paper", xanchor="right", yanchor="bottom", showarrow=False
    )
    figure.update_layout(meta={"alt": f"{figure.layout.meta['alt']} {text}."})


def describe(figure: go.Figure, alt: str) -> None:
    """Set what the figure says in words."""
    figure.update_layout(meta={"alt": alt})


def logged(frame: pd.DataFrame, metric: str) -> bool:
    """Whether the metric has at least one value."""
    return metric in frame and bool(frame[metric].notna().any())


def column(frame: pd.DataFrame, metric: str) -> pd.Series[float]:
    """The metric's values, NaN where it was never logged."""
    return frame[metric] if metric in frame else pd.Series(float("nan"), index=frame.index)


def sentence(parts: list[str]) -> str:
    """Parts joined to one sentence."""
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
