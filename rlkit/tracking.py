"""trackio in, one tidy frame per run out.

`load_run` is the way from a project to a frame; `save_frame` and `load_frame` keep that frame with a run's files, so
that a report needs nothing else. `write_run` is the way back, for engines that do not train with TRL's own logger.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlkit.errors import BadInput, NotLogged, RlkitError
from rlkit.machine import trackio_folder
from rlkit.recipe import Recipe, parse_recipe
from rlkit.trackio_source import Query, Source, open_source

__all__ = ["Run", "Source", "list_runs", "load_frame", "load_run", "save_frame", "tidy_frame", "write_run"]

# transformers' trackio callback puts this before every metric that is not an evaluation's.
TRAIN_PREFIX = "train/"

# Names that say where a row belongs; a row with nothing else (TRL's last one, once trackio's callback has taken the
# run's totals out) measures nothing.
_POSITION = frozenset({"global_step", "epoch"})

# JSON has no NaN and no infinities: trackio stores them under these names.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# Rows per query: below a trackio server's limit of 10,000, and a few megabytes each at 100 metrics a row.
_PAGE_ROWS = 2000

_METADATA_KEY = b"rlkit.run"


@dataclass(frozen=True)
class Run:
    """One run read back from trackio.

    `frame` has the index `global_step` (int, sorted, unique), one float column per TRL metric without the `train/`
    prefix, NaN where a step did not log it, and `timestamp` (UTC) of the step's row.
    """

    project: str
    name: str
    run_id: str
    config: dict[str, Any]
    recipe: Recipe | None  # None: not recorded, or by a version whose recipes this one cannot read
    frame: pd.DataFrame


@dataclass(frozen=True)
class LoggedRow:
    """One row as trackio holds it: the call counter, the time it was written, the metrics by their stored names."""

    step: int
    timestamp: str
    metrics: Mapping[str, Any]


def list_runs(project: str, source: Source | str | Path | None = None) -> pd.DataFrame:
    """The runs of a project, oldest first: name, run_id, created, steps, last_update. Raises BadInput.

    Times are UTC, NaT where trackio has none. `steps` is the highest global step, or the number of rows when none
    carries one. `source` is None for trackio's own folder, another folder, a server's URL or a Space.
    """
    with open_source(source).reading(project) as query:
        return _runs(query)


def load_run(
    project: str, name: str | None = None, run_id: str | None = None, source: Source | str | Path | None = None
) -> Run:
    """Read one run: by id, by name (the newest of that name), or the newest of the project. Raises BadInput.

    BadInput for a project or run that does not exist (naming those that do), a run without metrics, and a run in which
    no metric ever had a finite value.
    """
    place = open_source(source)
    with place.reading(project) as query:
        found = _pick(_runs(query), project, name, run_id, place.where)
        rows = _rows(query, str(found["run_id"]))
        config = _config(query, str(found["run_id"]))
    label = f"run {found['name']!r} of trackio project {project!r}"
    frame = tidy_frame(rows)
    metrics = frame.drop(columns=["timestamp", "epoch"], errors="ignore")
    if metrics.empty:
        raise NotLogged(f"{label} has no metrics yet: {len(rows)} rows, none with a number in it")
    if not np.isfinite(metrics.to_numpy()).any():
        raise BadInput(f"{label} holds only NaN: none of its {metrics.shape[1]} metrics ever had a finite value")
    return Run(project, str(found["name"]), str(found["run_id"]), config, _recipe(config), frame)


def tidy_frame(rows: Iterable[LoggedRow]) -> pd.DataFrame:
    """Logged rows in any order as one frame, see `Run`.

    A row belongs to its `train/global_step`; a row without one to the last global step logged before it, or, in a run
    that never logs one, to its call counter. Rows of one step are put together, the newest value of a metric wins. A
    row that repeats most of a step's metrics is that step run again after a resume, and replaces it: what the first
    attempt logged and the second did not (a drop count, say) never happened to the weights that went on.
    """
    ordered = sorted(rows, key=lambda row: (_time(row.timestamp), row.step))
    counted = [row for row in (_numbers(row) for row in ordered) if row.metrics.keys() - _POSITION]
    by_counter = not any(_is_step(row.metrics.get("global_step")) for row in counted)
    merged: dict[int, dict[str, Any]] = {}
    last_step = 0
    for row in counted:
        metrics = dict(row.metrics)
        step = metrics.pop("global_step", math.nan)
        if _is_step(step):
            last_step = int(step)
        at = row.step if by_counter else last_step
        there = merged.get(at)
        if there is None or _is_rerun(there, metrics):
            merged[at] = {"timestamp": _time(row.timestamp), **metrics}
        else:
            there.update(metrics)
    times = [metrics.pop("timestamp") for metrics in merged.values()]
    index = pd.Index(merged, dtype="int64", name="global_step")
    frame = pd.DataFrame(list(merged.values()), index=index, dtype="float64")
    return frame.assign(timestamp=pd.Series(times, index=index, dtype="datetime64[us, UTC]")).sort_index()


def write_run(
    project: str,
    name: str,
    rows: Sequence[Mapping[str, float]],
    timestamps: Sequence[datetime] | None = None,
    config: Mapping[str, Any] | None = None,
    run_id: str | None = None,
) -> str:
    """Write a whole run into trackio's folder and return its run id.

    Each row maps TRL's metric names (no prefix) and `global_step` to numbers; they are stored as transformers' callback
    would store them. `timestamps` (with a time zone) default to now. Passing the id of a run that exists continues it
    as a resume does. Raises RlkitError when TRACKIO_DIR was changed after trackio had been imported.
    """
    from trackio import utils  # a second or two, and only writing needs it
    from trackio.sqlite_storage import SQLiteStorage

    here, there = trackio_folder(), utils.TRACKIO_DIR
    if Path(there) != here:
        raise RlkitError(f"TRACKIO_DIR is {here}, but trackio was imported when it was {there} and writes there")
    run_id = run_id or uuid.uuid4().hex
    SQLiteStorage.bulk_log(
        project,
        name,
        [{_stored_name(key): value for key, value in row.items()} for row in rows],
        steps=[None] * len(rows),  # trackio counts on from the run's last row
        timestamps=None if timestamps is None else [t.isoformat() for t in timestamps],
        config=None if config is None else dict(config),
        run_id=run_id,
    )
    return run_id


def save_frame(run: Run, path: Path) -> None:
    """Keep a run (frame, config, where it came from) in one parquet file, replaced in one piece."""
    table = pa.Table.from_pandas(run.frame)
    about = {"project": run.project, "name": run.name, "run_id": run.run_id, "config": run.config}
    metadata = {**(table.schema.metadata or {}), _METADATA_KEY: json.dumps(about).encode()}
    unfinished = path.with_name(f"{path.name}.partial")
    pq.write_table(table.replace_schema_metadata(metadata), unfinished)
    os.replace(unfinished, path)


def load_frame(path: Path) -> Run:
    """Read what `save_frame` wrote. Raises BadInput for a file that is missing or is something else."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: there are no saved metrics; the run has not logged a step, or was not saved") from None
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from None
    about = json.loads((table.schema.metadata or {}).get(_METADATA_KEY, b"null"))
    if about is None:
        raise BadInput(f"{path}: a parquet file, but not one that rlkit saved a run in")
    frame = table.to_pandas()
    return Run(about["project"], about["name"], about["run_id"], about["config"], _recipe(about["config"]), frame)


def _runs(query: Query) -> pd.DataFrame:
    text = "CAST(metrics AS TEXT)"
    step = f"json_extract({text}, '$.\"{TRAIN_PREFIX}global_step\"')"
    rows = query(
        "SELECT run_name AS name, run_id, MIN(timestamp) AS created,"
        f" COALESCE(MAX(CASE WHEN json_valid({text}) THEN CAST({step} AS INTEGER) END), COUNT(*)) AS steps,"
        " MAX(timestamp) AS last_update FROM metrics GROUP BY run_id, run_name"
    )
    frame = pd.DataFrame(rows, columns=["name", "run_id", "created", "steps", "last_update"])
    for column in ("created", "last_update"):
        frame[column] = pd.to_datetime(frame[column], utc=True, format="ISO8601", errors="coerce")
    return frame.sort_values("created", kind="stable", ignore_index=True, na_position="first")


def _pick(runs: pd.DataFrame, project: str, name: str | None, run_id: str | None, where: str) -> pd.Series[Any]:
    if runs.empty:
        raise NotLogged(f"trackio project {project!r} in {where} has no runs yet")
    chosen = runs
    if run_id is not None:
        chosen = chosen[chosen["run_id"] == run_id]
    if name is not None:
        chosen = chosen[chosen["name"] == name]
    if chosen.empty:
        asked = " and ".join(f"{k} {v!r}" for k, v in (("name", name), ("id", run_id)) if v is not None)
        there = runs["name"].unique() if run_id is None else runs["name"] + " (" + runs["run_id"] + ")"
        raise NotLogged(f"trackio project {project!r} has no run with the {asked}; there are: {', '.join(there)}")
    return chosen.iloc[-1]


def _rows(query: Query, run_id: str) -> list[LoggedRow]:
    rows: list[LoggedRow] = []
    last = -1
    while True:
        page = query(
            f"SELECT id, step, timestamp, metrics FROM metrics WHERE run_id = {_quoted(run_id)} AND id > {last}"
            f" ORDER BY id LIMIT {_PAGE_ROWS}"
        )
        rows += [LoggedRow(int(r["step"]), str(r["timestamp"]), _json_object(r["metrics"])) for r in page]
        if len(page) < _PAGE_ROWS:
            return rows
        last = int(page[-1]["id"])


def _config(query: Query, run_id: str) -> dict[str, Any]:
    rows = query(f"SELECT config FROM configs WHERE run_id = {_quoted(run_id)} ORDER BY id DESC LIMIT 1")
    stored = _json_object(rows[0]["config"]) if rows else {}
    return {key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in stored.items()}


def _recipe(config: Mapping[str, Any]) -> Recipe | None:
    try:
        return parse_recipe(config["recipe"], "recipe") if "recipe" in config else None
    except BadInput:
        return None


def _numbers(row: LoggedRow) -> LoggedRow:
    """The row with its numbers only, under TRL's own names: no text, media, tables or traces."""
    numbers = {}
    for stored_name, value in row.metrics.items():
        name = stored_name.removeprefix(TRAIN_PREFIX)
        number = _NOT_FINITE.get(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and name != "timestamp":  # trackio's own name for the time of a row
            try:
                numbers[name] = float(number)
            except OverflowError:  # an integer beyond any float: not a measurement
                continue
    return LoggedRow(row.step, row.timestamp, numbers)


def _is_step(value: float | None) -> bool:
    return value is not None and abs(value) < 2**53  # what a float counts exactly; no NaN, no infinity


def _is_rerun(there: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    before = there.keys() - _POSITION - {"timestamp"}
    return 2 * len(before & new.keys()) > len(before)


def _time(timestamp: str) -> datetime:
    """The moment in UTC; a time without a zone is taken as that, and what is no time at all as the oldest."""
    try:
        moment = datetime.fromisoformat(timestamp)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return datetime.fromtimestamp(0, UTC)


def _stored_name(name: str) -> str:
    return name if name.startswith(("eval/", TRAIN_PREFIX)) else f"{TRAIN_PREFIX}{name}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _json_object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
