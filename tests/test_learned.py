"""The reward at both ends of a run."""

from __future__ import annotations

import pandas as pd
import pytest
from recorded_runs import recorded

from rlkit.learned import last_reward, rewards


def test_quarters_are_of_the_steps_that_logged_a_reward() -> None:
    frame = pd.DataFrame({"reward": [None, 0.1, 0.3, None, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]}, dtype=float)
    assert list(rewards(frame) or ()) == pytest.approx([0.2, 0.95])
    assert last_reward(frame.iloc[:2]) == 0.1
    assert last_reward(recorded("learning-run")) == pytest.approx(recorded("learning-run")["reward"].iloc[-12:].mean())


def test_without_a_reward_there_is_none() -> None:
    assert rewards(pd.DataFrame({"perf/step_s": [1.0]})) is None
    assert rewards(pd.DataFrame({"reward": [float("nan")]})) is None
    assert last_reward(pd.DataFrame()) is None
