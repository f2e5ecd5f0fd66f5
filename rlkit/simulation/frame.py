"""A simulated run in the shapes of a real one: trackio's rows, and the tidy frame read back from them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pandas as pd

from rlkit.simulation.simulate import Simulation

# Where the clock of a frame begins that nobody has logged; any moment would do.
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def logged_rows(run: Simulation, start: datetime = EPOCH) -> tuple[list[dict[str, float]], list[datetime]]:
    """TRL's rows with their `global_step`, and the moment of each on the run's own wall-clock."""
    rows = [step.metrics | {"global_step": float(step.number)} for step in run.steps]
    return rows, [start + timedelta(seconds=step.ended_at) for step in run.steps]


def frame_of(run: Simulation, start: datetime = EPOCH) -> pd.DataFrame:
    """The run as `rlkit.tracking.Run.frame` has it."""
    rows, moments = logged_rows(run, start)
    index = pd.Index([step.number for step in run.steps], dtype="int64", name="global_step")
    frame = pd.DataFrame(rows, index=index, dtype="float64").drop(columns="global_step")
    return frame.assign(timestamp=pd.Series(moments, index=index, dtype="datetime64[us, UTC]"))
