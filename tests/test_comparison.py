"""One metric of several runs."""

from __future__ import annotations

import pandas as pd

from rlkit.comparison import compare


def run(values: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"m": values}, index=pd.RangeIndex(1, 1 + len(values), name="global_step"))


def test_a_line_a_run_with_its_mean_in_words() -> None:
    nan = float("nan")
    figure = compare({"a": run([1.0, nan, 3.0]), "b": run([5.0])}, "m", "How much?", "Requests")
    first, second = figure.data
    assert (first.name, list(first.x), list(first.y)) == ("a", [1, 3], [1, 3])
    assert (second.name, list(second.y)) == ("b", [5])
    assert first.line.dash != second.line.dash
    assert figure.layout.meta["alt"] == "Requests, mean over the steps: a 2, b 5."


def test_a_run_without_the_metric_is_named_and_the_others_keep_their_looks() -> None:
    both = compare({"a": run([1.0]), "b": run([5.0])}, "m", "How much?", "Requests")
    one = compare({"a": run([float("nan")]), "b": run([5.0])}, "m", "How much?", "Requests")
    assert one.data[0].line.color == both.data[1].line.color
    assert "m of a: not logged." in one.layout.meta["alt"]


def test_no_run_with_the_metric_is_a_sentence() -> None:
    figure = compare({"a": run([float("nan")])}, "m", "How much?", "Requests")
    assert not figure.data
    assert figure.layout.meta["alt"] == "m: not logged in this run."
