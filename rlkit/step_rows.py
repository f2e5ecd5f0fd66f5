"""A run's steps.jsonl as a frame: what there is of a run that goes on, or whose trackio is on another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.tracking import LoggedRow, tidy_frame


def frame_of_steps(path: Path) -> pd.DataFrame:
    """The tidy frame of a steps.jsonl, whose last row was written when the file was. Raises OSError."""
    return frame_of_rows(rows_of(path), datetime.fromtimestamp(path.stat().st_mtime, UTC))


def frame_of_rows(rows: Iterable[Mapping[str, Any]], last_at: datetime) -> pd.DataFrame:
    """The tidy frame of steps.jsonl's rows, the last of which was written at `last_at`.

    The file has no times of its own: each row is a perf/step_s before the next. A step that was run again after a
    resume replaces the first attempt.
    """
    ordered = list(rows)
    moments, moment = [], last_at
    for row in reversed(ordered):
        moments.append(moment)
        moment -= timedelta(seconds=row.get("perf/step_s") or 0.0)
    logged = [
        LoggedRow(number, at.astimezone(UTC).isoformat(), row)
        for number, (row, at) in enumerate(zip(ordered, reversed(moments), strict=True))
    ]
    return tidy_frame(logged)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a steps.jsonl, in the order written; a line that its writer's end cut off is left out."""
    with path.open("rb") as stream:
        for line in stream:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
