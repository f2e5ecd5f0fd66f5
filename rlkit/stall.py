"""A run that has stopped making steps, by its own log alone or by what the clock says now."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pandas as pd

from rlkit.judgement import Judgement
from rlkit.signals import column
from rlkit.wording import number

# A step this many times longer than the run's usual one is no slow step: the published runs' slowest, with the sync and
# a checkpoint in it, took twice the median.
STALLED_STEPS = 10.0

# A short step that takes ten times as long is still a matter of seconds, and a checkpoint may be one.
LEAST_STALL_S = 60.0

# Steps that a usual one is taken from.
MIN_USUAL = 5

LOOK = "Look at the replicas and the rollout worker (rlkit doctor, the logs in the run's folder): no rollouts arrive."


def stalled(frame: pd.DataFrame, now: datetime | None) -> Judgement | None:
    """`stalled` when the last step took, or the one under way has taken, far longer than usual; None otherwise.

    `now` (aware) is the moment at which a run that goes on is looked at; None for one that has ended.
    """
    steps = column(frame, "perf/step_s").dropna()
    if len(steps) < MIN_USUAL + 1:
        return None
    usual = float(np.median(steps.iloc[:-1]))
    limit = max(STALLED_STEPS * usual, LEAST_STALL_S)
    last, waited = float(steps.iloc[-1]), column(frame, "perf/rollout_wait_s").reindex(steps.index).iloc[-1]
    if now is not None and "timestamp" in frame:
        logged = frame["timestamp"].dropna()
        silent = (pd.Timestamp(now) - logged.max()).total_seconds() if len(logged) else 0.0
        if silent > limit:
            why = f"the last step was logged {number(silent)} s ago, and a step usually takes {number(usual)} s"
            return Judgement("stalled", why, "high", LOOK)
    if last > limit and waited > last / 2:
        why = f"the last step waited {number(waited)} s for rollouts, and a step usually takes {number(usual)} s in all"
        return Judgement("stalled", why, "medium", LOOK)
    return None
