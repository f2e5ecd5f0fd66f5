"""What a verdict says beside its headline, as tables: causes, stretches of the run, signals, where the time went."""

from __future__ import annotations

import pandas as pd

from rlkit.diagnosis import Verdict
from rlkit.ledger import waste_ledger
from rlkit.recipe import Recipe
from rlkit.signal_table import signal_table
from rlkit.wording import number, percent

UNKNOWN = "the log cannot say"


def cause_table(verdict: Verdict) -> pd.DataFrame:
    """A row per cause, the most telling first: what it is, seconds of a step, what to change."""
    rows = [
        (cause.text, UNKNOWN if cause.seconds is None else f"{number(cause.seconds)} s", cause.next_action)
        for cause in verdict.causes
    ]
    return pd.DataFrame(rows, columns=["Cause", "Costs a step", "What to change"])


def stretch_table(verdict: Verdict) -> pd.DataFrame:
    """A row per stretch of steps that one side bounds, and what decided there."""
    rows = [
        (f"{part.first_step:.0f} to {part.last_step:.0f}", part.bound, f"{part.reason[:1].upper()}{part.reason[1:]}.")
        for part in verdict.timeline
    ]
    return pd.DataFrame(rows, columns=["Steps", "Bound by", "What decided"])


def ledger_table(frame: pd.DataFrame, recipe: Recipe | None) -> pd.DataFrame:
    """A row per use of the time of trainer and replicas; empty without a recipe, which says how many there are."""
    entries = [] if recipe is None else waste_ledger(frame, recipe)
    rows = [
        (
            entry.side,
            entry.use.replace("_", " "),
            f"{number(entry.seconds)} s",
            percent(entry.share),
            UNKNOWN if entry.usd is None else f"{entry.usd:,.2f} $",
        )
        for entry in entries
    ]
    columns = ["Side", "Use", "Device time", "Of that side", "Cost"]
    table = pd.DataFrame(rows, columns=columns)
    return table.drop(columns="Cost") if entries and entries[0].usd is None else table


def explained_signals(verdict: Verdict) -> pd.DataFrame:
    """Every signal that the log gave, with its unit, where it was read, and what it says to somebody new to it."""
    table = signal_table(verdict)
    values = [number(float(value)) for value in table["value"]]
    return pd.DataFrame(
        {
            "Signal": [name.replace("_", " ") for name in table["signal"]],
            "Value": [f"{value}\u00a0{unit}" for value, unit in zip(values, table["unit"], strict=True)],
            "What it says": table["says"],
            "Read from": table["origin"],
        }
    )
