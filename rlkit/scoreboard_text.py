"""The scoreboard and its companions as tables to read: a column a run, published figures in brackets beside their own.

Frames of texts. What a run did not log reads `not logged`, what only steps after the start could tell and none came
`only the start`, what cannot be known `unknown`; nothing is left blank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rlkit.past_run import PastRun
from rlkit.recipe import spelled
from rlkit.scoreboard import DECISIONS, changes
from rlkit.wording import number, percent

NOT_LOGGED, NO_COUNTERS, UNKNOWN = "not logged", "no counters", "unknown"
ONLY_THE_START = "only the start"
SIDES = ("trainer", "generation", "sync", "scoring")
# Up to here runs are columns, whose figures stand below each other; more are rows, or a page is too narrow for them.
MOST_COLUMNS = 6

Published = Mapping[str, Mapping[str, Any]]  # by run: the figures of published.json, its verdict, cause and next change

NOTHING_PUBLISHED: Published = {}

# Published figures of a whole run, which say nothing of one with more or fewer steps.
OF_WHOLE_RUN = frozenset(
    {"wall_clock_min", "syncs", "adapter_loads", "loads_second_attempt", "loads_third_attempt", "rollouts", "routed"}
)


def _dollars(value: float) -> str:
    return f"${value:,.2f}"


@dataclass(frozen=True)
class Line:
    """One figure of all runs: its words, the column that has it, the published figure beside it, and its spelling."""

    words: str
    name: str
    published: str | None = None
    spelled: Callable[[float], str] = number
    absent: str = NOT_LOGGED


LINES = (
    Line("Step, s", "step_s", "perf/step_s"),
    Line("Forward and backward, s", "fwd_bwd_s", "perf/fwd_bwd_s"),
    Line("Rollout wait, s", "rollout_wait_s", "perf/rollout_wait_s"),
    Line("Samples a step", "samples_per_step", "batch/samples_per_step"),
    Line("Samples a second", "samples_s"),
    Line("Queue, samples", "queue", "sample/rollout_queue_size"),
    Line("Held back, s", "backpressure_s", "rollout/backpressure_s", absent="none was"),
    Line("Staleness, versions", "staleness", "sample/staleness_mean"),
    Line("Generated tok/s", "generated_tok_s", "rollout/generated_tok_s"),
    Line("MFU, %", "mfu", "perf/mfu_fwd_bwd"),
    Line("Weight sync, s", "weight_sync_s", "perf/weight_sync_s"),
)
SYNC_LINES = (
    Line("Syncs in the log", "syncs", "syncs"),
    Line("Whole, s (median)", "whole_s", "perf/weight_sync_s"),
    Line("of it pause, s", "pause_s", "weight_sync_pause_s"),
    Line("of it save, s", "save_s", "weight_sync_save_s"),
    Line("of it acceptance by all replicas, s", "accept_s", "weight_sync_accept_s"),
    Line("Share of the wall-clock", "share", "sync_share_of_wall", percent),
    Line("Loads on single replicas", "loads", "adapter_loads", absent=NO_COUNTERS),
    Line("with one attempt", "attempts_1", absent=NO_COUNTERS),
    Line("with two", "attempts_2", "loads_second_attempt", absent=NO_COUNTERS),
    Line("with three", "attempts_3", "loads_third_attempt", absent=NO_COUNTERS),
    Line("with more", "attempts_more", absent=NO_COUNTERS),
)
ROUTING_LINES = (
    Line("Rollouts routed", "routed", "rollouts", absent=NO_COUNTERS),
    Line("to the replica with their prompt", "affinity_share", "affinity_share", percent, NO_COUNTERS),
    Line("elsewhere, that one being ahead", "spilled_share", "spilled_share", percent, NO_COUNTERS),
    Line("with a prompt no replica had", "unmatched_share", "unmatched_share", percent, NO_COUNTERS),
    Line("in turn", "round_robin_share", None, percent, NO_COUNTERS),
)
# Figures of the steps after the start alone.
OF_SETTLED = frozenset({*(line.name for line in LINES), "whole_s", "pause_s", "save_s", "accept_s"})


def published_figures(runs: Mapping[str, PastRun]) -> dict[str, dict[str, Any]]:
    """What was published of those of the runs whose recipe is a published one's, by its name."""
    from rlkit.simulation.published import published_runs

    known = {run.name: run for run in published_runs()}
    found = {}
    for label, run in runs.items():
        told = known.get(run.recipe.name) if run.recipe is not None else None
        if told is None:
            continue
        figures = dict(told.figures)
        if figures.get("rollouts"):
            figures |= {f"{name}_share": figures[name] / figures["rollouts"] for name in DECISIONS if name in figures}
        if len(run.frame) != told.steps_run:
            figures = {name: value for name, value in figures.items() if name not in OF_WHOLE_RUN}
        found[label] = figures | {"verdict": told.verdict, "cause": told.cause, "next": told.next_change}
    return found


def scoreboard_table(board: pd.DataFrame, published: Published = NOTHING_PUBLISHED) -> pd.DataFrame:
    """`rlkit.scoreboard.scoreboard` to read: the changes first, then figures, time and money, the verdict last."""
    changed = ["the first run", *(_text(change, UNKNOWN) for change in board["change"].iloc[1:])]
    rows = [("What changed", *changed), ("Engine", *(_text(engine, UNKNOWN) for engine in board["engine"]))]
    rows += _rows(board, LINES, published)
    rows.append(("Logged", *(_logged(board.loc[run]) for run in board.index)))
    whole = (
        Line("Whole recipe, min", "recipe_minutes", "wall_clock_min", absent=UNKNOWN),
        Line("Cost of that", "recipe_usd", None, _dollars, "no price"),
    )
    rows += _rows(board, whole, published)
    verdicts = []
    for run in board.index:
        told = published.get(run, {}).get("verdict")
        bound = str(board["bound"][run])
        side = f"{bound}-bound" if bound in SIDES else bound
        told = "same" if told == side else told
        verdicts.append(f"{side} ({told})" if told else side)
    rows.append(("Verdict", *verdicts))
    rows.append(("Confidence", *map(str, board["confidence"])))
    rows.append(("Cause", *(_text(cause, "none named") for cause in board["cause"])))
    return _laid_out(rows, list(board.index))


def sync_table(syncs: pd.DataFrame, published: Published = NOTHING_PUBLISHED) -> pd.DataFrame:
    """`rlkit.scoreboard.weight_syncs` to read."""
    return _laid_out(_rows(syncs, SYNC_LINES, published), list(syncs.index))


def routing_table(counts: pd.DataFrame, published: Published = NOTHING_PUBLISHED) -> pd.DataFrame:
    """`rlkit.scoreboard.routing` to read; how the proxy chose, as shares of all rollouts."""
    shares = counts[list(DECISIONS)].div(counts["routed"], axis=0).add_suffix("_share").join(counts)
    rows = _rows(shares, ROUTING_LINES, published)
    split = []
    for run in counts.index:
        told = published.get(run, {}).get("routed")
        text = _text(counts.at[run, "per_replica"], NO_COUNTERS)
        split.append(f"{text} ({' / '.join(number(float(one)) for one in told)})" if told else text)
    return _laid_out([rows[0], ("to each replica", *split), *rows[1:]], list(counts.index))


def changes_table(before: PastRun | None, run: PastRun) -> pd.DataFrame:
    """The recipe as a diff to the run before: field, old value, new value; no rows when nothing changed."""
    rows = [(name, spelled(old), spelled(new)) for name, old, new in changes(before, run) or []]
    return pd.DataFrame(rows, columns=["Field", "Before", "Now"])


def breakable(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose long names may be broken after a dot or an underscore, for a page that five of them must fit."""

    def broken(cell: str) -> str:
        return re.sub(r"(?<=[a-z])([._])(?=[a-z])", "\\1\u200b", cell)

    return table.map(broken)


def about(runs: Mapping[str, PastRun], published: Published) -> dict[str, str]:
    """Which runs these are, in a few words, and what brackets in the tables mean."""
    engines = dict.fromkeys(run.recipe.engine if run.recipe else UNKNOWN for run in runs.values())
    facts = {"runs": ", ".join(runs), "engine": ", ".join(engines)}
    return facts | ({"in brackets:": "what was published of a run"} if published else {})


def _rows(frame: pd.DataFrame, lines: Sequence[Line], published: Published) -> list[tuple[str, ...]]:
    rows = []
    for line in lines:
        cells = []
        for run in frame.index:
            started_only = line.name in OF_SETTLED and frame["settled"][run] == 0
            absent = ONLY_THE_START if started_only else line.absent
            cells.append(_cell(line, absent, float(frame[line.name][run]), published.get(run, {})))
        rows.append((line.words, *cells))
    return rows


def _cell(line: Line, absent: str, value: float, published: Mapping[str, Any]) -> str:
    own = absent if math.isnan(value) else line.spelled(value)
    told = published.get(line.published) if line.published else None
    if told is None:
        return own
    ends = told if isinstance(told, list) else [told]
    return f"{own} ({' to '.join(line.spelled(float(end)) for end in ends)})"


def _text(value: object, absent: str) -> str:
    return value if isinstance(value, str) and value else absent


def _logged(row: pd.Series[Any]) -> str:
    steps = f"{number(row['steps'])} steps"
    if math.isnan(row["minutes"]):
        return steps
    cost = "" if math.isnan(row["usd"]) else f", {_dollars(row['usd'])}"
    return f"{steps} in {number(row['minutes'])} min{cost}"


def _laid_out(rows: list[tuple[str, ...]], runs: list[str]) -> pd.DataFrame:
    if len(runs) <= MOST_COLUMNS:
        return pd.DataFrame(rows, columns=["", *runs])
    return pd.DataFrame(
        [[run, *cells] for run, *cells in zip(runs, *(row[1:] for row in rows), strict=True)],
        columns=["Run", *(row[0] for row in rows)],
    )
