"""What a run learned, in two figures."""

from __future__ import annotations

import pandas as pd

REWARD = "reward"  # TRL's own name; a simulated run does not log it

# Of the steps, at either end: enough of them that their mean is one, and few enough to tell the end from the way there.
QUARTER = 4


def rewards(frame: pd.DataFrame) -> tuple[float, float] | None:
    """The mean reward of the first and of the last quarter of the steps that logged one; None where none did."""
    logged = frame[REWARD].dropna() if REWARD in frame else pd.Series(dtype=float)
    if logged.empty:
        return None
    quarter = max(1, len(logged) // QUARTER)
    return float(logged.iloc[:quarter].mean()), float(logged.iloc[-quarter:].mean())


def last_reward(frame: pd.DataFrame) -> float | None:
    """The second of these: how well it did in the end."""
    found = rewards(frame)
    return None if found is None else found[1]
