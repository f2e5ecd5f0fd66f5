"""What a sweep comes to: each point's run in one summary, and all of them in one tidy table, a row a point. Pure but
for the two readers.

Columns: `point`, `name`, `status`, `error`, `attempts`; the fields that differ, by the names of `column_of`;
`verdict`, `confidence`, `headline`, `next_action`; `steps`, `step_s`, `wall_clock_min`, `usd`; every metric that was
logged, under TRL's own name, as its mean over the settled steps. `last_reward`, where a reward was logged, is its mean
over the last quarter of the steps: how well the run did in the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlkit.engines.state import read_state
from rlkit.errors import BadInput
from rlkit.learned import last_reward
from rlkit.pace import logged_minutes
from rlkit.price import usd_paid, usd_per_hour
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.signals import settled_steps
from rlkit.sweep_folder import Ended, Summary, column_of
from rlkit.wording import number

if TYPE_CHECKING:
    from rlkit.sweep import Sweep

OUTCOME = (
    "verdict",
    "confidence",
    "headline",
    "next_action",
    "steps",
    "step_s",
    "wall_clock_min",
    "usd",
    "last_reward",
)

# What a table to read shows of the metrics; the others are in the file.
SHOWN_METRICS = ("perf/rollout_wait_s", "sample/staleness_mean")


def summarise(folder: RunFolder, base: Recipe, frame: pd.DataFrame, recipe: Recipe) -> Summary:
    """A finished run's folder summed up; `base` is the recipe that the sweep changes.

    Raises BadInput without a verdict.
    """
    try:
        verdict = json.loads(folder.verdict.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise BadInput(f"{folder.verdict}: no verdict was written") from None
    settled = settled_steps(frame, recipe).drop(columns=["timestamp", "epoch"], errors="ignore")
    means = settled.mean().dropna()
    metrics = {str(name): float(value) for name, value in means.items()}
    minutes = logged_minutes(frame, recipe)
    paid = usd_paid(read_state(folder))
    return Summary(
        verdict=verdict["bound"],
        confidence=verdict["confidence"],
        headline=verdict["headline"],
        next_action=verdict["next_action"],
        steps=len(frame),
        step_s=metrics.get("perf/step_s"),
        wall_clock_min=minutes,
        usd=cost(base, recipe, minutes) if paid is None else paid,
        metrics=metrics,
        last_reward=last_reward(frame),
    )


def cost(base: Recipe, recipe: Recipe, minutes: float | None) -> float | None:
    """USD of so many minutes; a recipe with other hardware than `base` costs by the GPU. None when nobody said."""
    rate = usd_per_hour(base, recipe)
    return None if rate is None or minutes is None else rate * minutes / 60


def results_table(sweep: Sweep, ended: Mapping[str, Ended]) -> pd.DataFrame:
    """All points as one frame, in the grid's order; a point that has not ended is `waiting`."""
    rows = []
    for point in sweep.points:
        end = ended.get(point.key)
        summary = end.summary if end is not None else None
        row: dict[str, Any] = {
            "point": point.number,
            "name": point.name,
            "status": end.status if end is not None else "waiting",
            "error": end.error if end is not None else None,
            "attempts": end.attempts if end is not None else 0,
        }
        row |= {column_of(field): _value_of(point.recipe, point.values, field) for field in sweep.fields}
        row |= {name: getattr(summary, name, None) for name in OUTCOME}
        rows.append(row | (dict(sorted(summary.metrics.items())) if summary is not None else {}))
    return _typed(pd.DataFrame(rows), [column_of(field) for field in sweep.fields])


def headline(table: pd.DataFrame) -> str:
    """What a sweep came to, in a sentence or two: how many points, the fastest, what failed."""
    done = table[table["status"] == "done"]
    others = [f"{count} {status}" for status, count in table["status"].value_counts().items() if status != "done"]
    counted = ", ".join([f"{len(done)} of {len(table)} points ran", *others])
    timed = done[done["step_s"].notna()]
    if timed.empty:
        return f"{counted}."
    best = timed.sort_values("step_s", kind="stable").iloc[0]
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in done["verdict"].value_counts().items())
    return (
        f"{counted}; the fastest is point {best['point']} with {number(float(best['step_s']))} s a step"
        f" ({best['verdict']}). Verdicts: {verdicts}."
    )


def failures(table: pd.DataFrame) -> pd.DataFrame:
    """The points that did not end well, with the reason on one line."""
    bad = table[table["status"] != "done"]
    reasons = ["" if pd.isna(error) else str(error).splitlines()[0] for error in bad["error"]]
    return pd.DataFrame(
        {"point": bad["point"], "status": bad["status"], "attempts": bad["attempts"], "reason": reasons}
    )


def to_read(table: pd.DataFrame, fields: list[str]) -> pd.DataFrame:
    """The columns of a results table that a person looks at first."""
    metrics = [name for name in SHOWN_METRICS if name in table and table[name].notna().any()]
    columns = ["point", "status", *fields, "verdict", "step_s", "wall_clock_min", "usd", "last_reward", *metrics]
    return rounded(table[[name for name in columns if name in table and table[name].notna().any()]])


def rounded(table: pd.DataFrame) -> pd.DataFrame:
    """The same with three digits of every fraction: more are noise to a reader."""
    fractions = table.select_dtypes("float")
    return table.assign(**{str(name): fractions[name].map(lambda value: float(f"{value:.3g}")) for name in fractions})


def _value_of(recipe: Recipe, values: Mapping[str, Any], field: str) -> Any:
    """What the grid gave, else what the recipe says: a listed point need not name every field."""
    if field in values:
        return values[field]
    found: Any = recipe.to_dict()
    for part in field.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _typed(table: pd.DataFrame, fields: Sequence[str]) -> pd.DataFrame:
    """Columns with one type each, as parquet wants them: mixed ones and lists become text."""
    for name in fields:
        known = {number: value for number, value in table[name].items() if not _is_missing(value)}
        kinds = {type(value) for value in known.values()}
        if (len(kinds) > 1 and not kinds <= {int, float}) or kinds & {list, dict}:
            table[name] = [json.dumps(known[number]) if number in known else None for number in table.index]
    for name in ("error", "verdict", "confidence", "headline", "next_action"):
        table[name] = table[name].astype("str")
    return table


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)
