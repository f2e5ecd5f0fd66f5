"""A log's rows in order: what a resumed, retried or interrupted run leaves behind, made one row per step."""

from __future__ import annotations

import numpy as np
import pandas as pd


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame sorted by its step, one row for each.

    Of a step that was logged more than once the last value of every metric counts: a resumed run trains a step anew.
    Rows without a step are left out. An index that is no numbers at all stays as it is.
    """
    try:
        steps = np.asarray(frame.index, dtype="float64")
    except (TypeError, ValueError):
        return frame
    if np.all(np.isfinite(steps)) and np.all(np.diff(steps) > 0):
        return frame
    finite: pd.DataFrame = frame[np.isfinite(steps)]
    known = finite.loc[:, ~finite.columns.duplicated(keep="last")].sort_index(kind="stable")
    if not known.index.has_duplicates:
        return known
    last: pd.DataFrame = known.groupby(level=0).last()
    return last
