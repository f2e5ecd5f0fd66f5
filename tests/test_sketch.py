"""A figure's lines as ink: what is drawn is what the figure says."""

from __future__ import annotations

import html
import math
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import recipe, recorded

from rlkit import chart, figures
from rlkit.live import FIGURES
from rlkit.sketch import HEIGHT, MOST_POINTS, WIDTH, sketch, thin, ticks


def svg_of(figure: go.Figure) -> ElementTree.Element:
    """The picture, parsed: what is not well-formed fails here."""
    found = re.search(r'<svg viewBox="0 0 480.*?</svg>(?=<figcaption)', sketch(figure), re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found.group())


def drawn(values: list[float]) -> go.Figure:
    frame = pd.DataFrame({"y": values}, index=pd.RangeIndex(1, len(values) + 1))
    figure = chart.blank("What?", "y")
    chart.line(figure, chart.x_values(figure, frame, "step"), frame["y"], "line", chart.BLUE)
    return figure


@pytest.mark.parametrize("name", list(FIGURES))
@pytest.mark.parametrize("recording", ["learning-run", "trainer-bound-run"])
def test_every_figure_of_the_live_view_is_drawn_inside_its_box(name: str, recording: str) -> None:
    figure = FIGURES[name](recorded(recording), recipe())
    text = sketch(figure)
    assert html.escape(figure.layout.title.text) in text
    if not figure.data:
        return
    picture = svg_of(figure)
    assert picture.get("aria-label") == figure.layout.meta["alt"]
    paths = [one.get("d") or "" for one in picture.iter("path")] + [
        one.get("points") or "" for one in picture.iter("polygon")
    ]
    numbers = [float(number) for path in paths for number in re.findall(r"-?\d+\.\d+", path)]
    assert numbers
    assert min(numbers) >= 0
    assert max(numbers) <= max(WIDTH, HEIGHT)
    assert len(text) < 30_000


def test_a_gap_is_a_gap_and_a_line_goes_up_where_values_do() -> None:
    [path] = [one.get("d") or "" for one in svg_of(drawn([1.0, 2.0, math.nan, 3.0, 4.0])).iter("path")]
    assert path.count("M") == 2
    heights = [float(pair.split()[1]) for pair in re.findall(r"[\d.]+ [\d.]+", path)]
    assert heights == sorted(heights, reverse=True)


def test_thousands_of_points_stay_small_and_keep_their_peak() -> None:
    values = [1.0] * 20_000
    values[7_777] = 50.0
    text = sketch(drawn(values))
    assert len(text) < 40_000
    [path] = [one.get("d") or "" for one in svg_of(drawn(values)).iter("path")]
    assert len({float(pair.split()[1]) for pair in re.findall(r"[\d.]+ [\d.]+", path)}) == 2


def test_a_figure_without_a_line_says_so_in_its_caption() -> None:
    text = sketch(figures.reward(pd.DataFrame({"perf/step_s": [1.0]}, index=[1])))
    assert "<svg" not in text
    assert "reward: not logged in this run." in text


def test_names_are_escaped() -> None:
    figure = drawn([1.0, 2.0])
    figure.data[0].name = "<b>"
    chart.describe(figure, '"><script>')
    assert "<script>" not in sketch(figure)
    assert "<b>" not in sketch(figure)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9), st.integers(1, 10))
def test_ticks_lie_within_and_are_few(low: float, span: float, about: int) -> None:
    found = ticks(low, low + span, about)
    assert len(found) <= about + 1
    assert all(low - span * 1e-3 <= tick <= low + span * 1.001 for tick in found)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=5_000))
def test_thinned_values_keep_their_extremes(values: list[float]) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    few_x, few_y = thin(x, y, 100)
    assert len(few_x) == len(few_y) <= max(100, min(len(values), MOST_POINTS))
    assert list(few_x) == sorted(few_x)
    if not np.isnan(y).all():
        assert (np.nanmin(few_y), np.nanmax(few_y)) == (np.nanmin(y), np.nanmax(y))
