"""Figures that compare the points of a sweep: a results table (`rlkit.sweep_table`) in, a plotly figure out.

Every figure says its finding in words in `layout.meta["alt"]`, as those of `rlkit.figures` do. Points that did not end
well are left out, and counted in words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rlkit import chart
from rlkit.chart import BLUE, GREEN, GREY, PURPLE, SKY, VERMILLION
from rlkit.wording import number

# One colour and one marker a verdict, so that neither is needed to tell them apart.
BOUNDS: dict[str, tuple[str, str]] = {
    "trainer": (BLUE, "circle"),
    "generation": (VERMILLION, "diamond"),
    "sync": (PURPLE, "square"),
    "scoring": (SKY, "triangle-up"),
    "balanced": (GREEN, "cross"),
}
_OTHER = (GREY, "x")
# From light to dark in one hue: it reads the same in greyscale and with every colour blindness.
_SCALE = [[0.0, "#eaf3fa"], [1.0, "#00446b"]]
_ROOM = 0.06  # of an axis on either side of its first and last value
_LABEL = 0.05  # of an axis: what a label takes of it


def usable(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The points that ended well and have a number in each of these columns."""
    known = table[table["status"] == "done"]
    for name in columns:
        known = known[pd.to_numeric(known[name], errors="coerce").notna()] if name in known else known.iloc[:0]
    return known


def varied(table: pd.DataFrame, fields: Sequence[str]) -> list[str]:
    """The fields that have more than one value in the table."""
    return [name for name in fields if name in table and table[name].astype(str).nunique() > 1]


def parallel_coordinates(table: pd.DataFrame, fields: Sequence[str], metrics: Sequence[str]) -> go.Figure:
    """One line a point across an axis for each varied field and each metric; the colour is that of its verdict.

    Drawn as lines on one plot rather than as plotly's `parcoords`, which has no dashes, no hover and no keyboard.
    """
    figure = chart.blank("Which values go together?", "")
    figure.update_yaxes(visible=False, range=[-_ROOM, 1 + _ROOM])
    axes = varied(table, fields) + [
        name for name in metrics if name in table and usable(table, name)[name].nunique() > 1
    ]
    points = usable(table)
    if len(points) < 2 or len(axes) < 2:
        chart.say(figure, "fewer than two points or two axes to compare")
        return figure
    heights = {name: _scaled(points[name]) for name in axes}
    for verdict, group in points.groupby("verdict", sort=False):
        colour, _ = BOUNDS.get(str(verdict), _OTHER)
        xs: list[float | None] = []
        ys: list[float | None] = []
        words: list[str | None] = []
        for row in group.index:
            xs += [*range(len(axes)), None]
            ys += [_plain(heights[name][row]) for name in axes] + [None]
            said = f"point {_word(points.at[row, 'point'])}: " + ", ".join(
                f"{n} {_word(points.at[row, n])}" for n in axes
            )
            words += [said] * len(axes) + [None]
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=ys,
                text=words,
                mode="lines+markers",
                name=f"{verdict} ({len(group)})",
                line={"color": colour, "width": 1.5},
                marker={"size": 5, "color": colour, "symbol": BOUNDS.get(str(verdict), _OTHER)[1]},
                opacity=0.7,
                hovertemplate="%{text}<extra></extra>",
            )
        )
    for position, name in enumerate(axes):
        figure.add_vline(x=position, line={"color": GREY, "width": 1}, layer="below")
        for value, height in _labels(points[name], heights[name]):
            figure.add_annotation(
                x=position, y=height, text=_word(value), showarrow=False, xanchor="left", xshift=6, font={"size": 11}
            )
    figure.update_xaxes(
        tickvals=list(range(len(axes))), ticktext=[_short(name) for name in axes], range=[-0.2, len(axes) - 0.6]
    )
    figure.update_layout(hovermode="closest", height=400)
    best = _best(points, metrics)
    chart.describe(figure, f"{len(points)} points across {', '.join(axes)}. {best}".strip())
    return figure


def heat_map(table: pd.DataFrame, fields: Sequence[str], metric: str) -> go.Figure:
    """The mean of a metric for each pair of values of the first two fields; a pair without a point stays empty."""
    points = usable(table, metric)
    if points.empty or len(fields) < 2:
        figure = chart.blank(metric, "")
        why = "no point has it" if points.empty else "a map needs two fields that vary"
        chart.say(figure, f"{metric}: {why}")
        return figure
    x, y = fields[:2]
    figure = chart.blank(f"{metric} by {_short(x)} and {_short(y)}", y)
    cells = points.assign(**{metric: pd.to_numeric(points[metric])}).pivot_table(
        index=y, columns=x, values=metric, aggfunc="mean"
    )
    values = cells.to_numpy(dtype=float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    names = [[_word(value) for value in cells.columns], [_word(value) for value in cells.index]]
    figure.add_trace(
        go.Heatmap(
            x=names[0],
            y=names[1],
            z=values,
            text=[["" if np.isnan(value) else number(float(value)) for value in across] for across in values],
            texttemplate="%{text}",
            colorscale=_SCALE,
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": metric}, "thickness": 12},
            hovertemplate=f"{x} %{{x}}<br>{y} %{{y}}<br>{metric} %{{z:.4~g}}<extra></extra>",
        )
    )
    figure.update_xaxes(title={"text": x}, type="category", showgrid=False)
    figure.update_yaxes(type="category", rangemode="normal", showgrid=False)
    figure.update_layout(showlegend=False, hovermode="closest", height=190 + 46 * len(names[1]))
    row, column = np.unravel_index(int(np.nanargmin(values)), values.shape)
    chart.describe(
        figure,
        f"Mean {metric} of {len(points)} points: lowest {number(low)} at {x} {names[0][column]} and {y}"
        f" {names[1][row]}, highest {number(high)}.",
    )
    return figure


def pareto_front(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The points that no other one beats in both columns, less being better; sorted by `x`."""
    points = usable(table, x, y).sort_values([x, y], kind="stable")
    best = points[y].cummin().shift(fill_value=np.inf)
    front: pd.DataFrame = points[points[y] < best]
    return front


def pareto(table: pd.DataFrame, x: str, y: str) -> go.Figure:
    """Two figures of every point, and the front of those that no other one beats in both (less is better)."""
    figure = chart.blank(f"What is worth its {_short(x)}?", y)
    points = usable(table, x, y)
    if points.empty:
        chart.say(figure, f"{x} and {y}: no point has both")
        return figure
    for verdict, group in points.groupby("verdict", sort=False):
        colour, symbol = BOUNDS.get(str(verdict), _OTHER)
        figure.add_trace(
            go.Scatter(
                x=group[x].to_numpy(),
                y=group[y].to_numpy(),
                text=[f"point {point}" for point in group["point"]],
                mode="markers",
                name=f"{verdict} ({len(group)})",
                marker={"size": 9, "color": colour, "symbol": symbol},
                hovertemplate=f"%{{text}}<br>{x} %{{x:.4~g}}<br>{y} %{{y:.4~g}}<extra></extra>",
            )
        )
    front = pareto_front(table, x, y)
    figure.add_trace(
        go.Scatter(
            x=front[x].to_numpy(),
            y=front[y].to_numpy(),
            mode="lines",
            name="front",
            line={"color": GREY, "width": 2, "dash": "dash", "shape": "hv"},
            hoverinfo="skip",
        )
    )
    figure.update_xaxes(title={"text": x}, showgrid=True, rangemode="tozero")
    figure.update_layout(hovermode="closest")
    said = ", ".join(
        f"point {point} ({number(float(across))}, {number(float(up))})"
        for point, across, up in zip(front["point"], front[x], front[y], strict=True)
    )
    chart.describe(figure, f"{len(front)} of {len(points)} points are on the front of {x} and {y}: {said}.")
    return figure


def _scaled(values: pd.Series[float]) -> pd.Series[float]:
    """Heights from 0 to 1: numbers by their size, anything else by its order of appearance."""
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.notna().sum() < values.notna().sum() or values.dtype == bool:
        codes, _ = pd.factorize(values.astype(str))
        numbers = pd.Series(codes, index=values.index, dtype=float)
    span = numbers.max() - numbers.min()
    scaled: pd.Series[float] = (numbers - numbers.min()) / span if span else numbers * 0 + 0.5
    return scaled


def _labels(values: pd.Series[float], heights: pd.Series[float]) -> list[tuple[object, float]]:
    """The values at the ends of an axis, and those between that have room for their label."""
    known = pd.DataFrame({"value": values, "height": heights}).dropna().drop_duplicates("height").sort_values("height")
    kept: list[tuple[object, float]] = []
    top = float(known["height"].max())
    for value, height in zip(known["value"], known["height"], strict=True):
        fits = not kept or height - kept[-1][1] >= _LABEL
        if height == top or (fits and top - height >= _LABEL):
            kept.append((value, float(height)))
    return kept


def _best(points: pd.DataFrame, metrics: Sequence[str]) -> str:
    name = next((name for name in metrics if name in points and points[name].notna().any()), None)
    if name is None:
        return ""
    best = points.sort_values(name, kind="stable").iloc[0]
    return f"Lowest {name}: point {best['point']} with {_word(best[name])}."


def _plain(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def _word(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float | np.floating):
        return "unknown" if pd.isna(value) else number(float(value))
    return str(value)


def _short(name: str) -> str:
    """A field without its section, which its axis has no room for."""
    return name.rpartition(".")[2]
