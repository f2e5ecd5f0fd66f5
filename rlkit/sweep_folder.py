"""What a sweep leaves on disk, and how each point ended; light, so that a sweep without work is over at once.

    <out>/sweep.json                 what was asked for
    <out>/recipes/<name>.yaml        what each point's notebook is given
    <out>/points/<name>/             one folder a point, the folder of its run: recipe.yaml, verdict.json, ...
        report.html, point.json      its page, and how it ended; without the second it has not
    <out>/results.parquet, .json     one row a point (`rlkit.sweep_table`)
    <out>/index.html                 the table, the figures, a link to every page (notebooks/06_sweep.ipynb)

Whatever kills the sweep, a point is there as a whole or to be run again: `point.json` is written last, and whole or not
at all.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlkit import machine
from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.sweep import Point, Sweep

Status = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class Summary:
    """One run. `step_s`, `wall_clock_min` and `metrics` are means and times of the run's own clock."""

    verdict: str
    confidence: str
    headline: str
    next_action: str
    steps: int
    step_s: float | None
    wall_clock_min: float | None
    usd: float | None  # None: nobody said what an hour costs
    metrics: dict[str, float]
    last_reward: float | None = None  # None: none was logged, as by a simulated run


@dataclass(frozen=True)
class Ended:
    """How a point ended; `summary` is None unless its run left a verdict."""

    key: str
    status: Status
    error: str | None = None
    attempts: int = 1
    seconds: float = 0.0  # of this machine, kernel and page included
    summary: Summary | None = None
    spent_usd: float = 0.0  # on rented hardware, also by a point that failed

    def to_dict(self) -> dict[str, Any]:
        """As `point.json` holds it."""
        return asdict(self)


@dataclass(frozen=True)
class SweepFolder:
    """Names of the files of a sweep. Nothing here touches the disk."""

    path: Path

    @property
    def plan(self) -> Path:
        """What was asked for (JSON)."""
        return self.path / "sweep.json"

    @property
    def table(self) -> Path:
        """One row a point (parquet); its JSON twin lies beside it."""
        return self.path / "results.parquet"

    @property
    def index(self) -> Path:
        """The page that leads to all others."""
        return self.path / "index.html"

    @property
    def written(self) -> Path:
        """What table and index were made from (JSON, `rlkit.sweep_current`)."""
        return self.path / ".written.json"

    def run(self, point: Point) -> RunFolder:
        """The folder of a point's run."""
        return RunFolder(self.path / "points" / point.name)

    def recipe(self, point: Point) -> Path:
        """What a point's notebook is given as its recipe."""
        return self.path / "recipes" / f"{point.name}.yaml"

    def record(self, point: Point) -> Path:
        """How a point ended (JSON)."""
        return self.run(point).path / "point.json"


def column_of(field: str) -> str:
    """A grid's field as the table calls it: `reward` is a metric there, and `recipe.reward` a field.

    >>> column_of("serve.replicas"), column_of("reward"), column_of("count")
    ('serve.replicas', 'recipe.reward', 'parameter.count')
    """
    if "." in field:
        return field
    return f"recipe.{field}" if field in Recipe.model_fields else f"parameter.{field}"


def read_ended(folder: SweepFolder, point: Point) -> Ended | None:
    """How a point ended, None when it has not, or when what is there is another content's."""
    try:
        found = json.loads(folder.record(point).read_text(encoding="utf-8"))
        summary = found.pop("summary")
        ended = Ended(**found, summary=None if summary is None else Summary(**summary))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return ended if ended.key == point.key else None


def in_words(point: Point, ended: Ended) -> str:
    """How a point ended, on one line."""
    dead = ended.attempts - (ended.status == "done")
    again = f" (its kernel died {dead} time{'s' * (dead > 1)})" if ended.attempts > 1 else ""
    if ended.summary is None:
        reason = next(iter((ended.error or "").splitlines()), "")
        return f"{ended.status}: {point.label}: {reason}{again}"
    step = "" if ended.summary.step_s is None else f", {ended.summary.step_s:.2f} s a step"
    return f"{ended.summary.verdict}{step}: {point.label}{again}"


@contextmanager
def claimed(folder: SweepFolder) -> Iterator[None]:
    """The folder, for one sweep alone. Raises BadInput where it is something else's, or another sweep is in it."""
    path = folder.path
    if (path / "recipe.yaml").exists():
        raise BadInput(f"{path}: holds a run, not a sweep; choose another --out")
    problem = machine.unwritable(path)
    if problem is not None:
        raise BadInput(f"{path}: {problem}; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{path}: a sweep is going on here; choose another --out") from None
        yield


def asked_for(sweep: Sweep) -> dict[str, Any]:
    """What `sweep.json` says of a sweep."""
    points = [{"name": point.name, "values": point.values} for point in sweep.points]
    asked: dict[str, Any] = {"name": sweep.name, "notebook": str(sweep.notebook), "points": points}
    return asked | {"fields": [column_of(field) for field in sweep.fields], "recipe": sweep.base.to_dict()}


def write_json(path: Path, data: object) -> None:
    """Write a file of JSON, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)
