"""What a run survives."""

from __future__ import annotations

import pytest

from rlkit.engines.hf_recovery import MAX_RESTARTS, Restarts, goes_on_without

pytestmark = pytest.mark.hub


def test_trainer_that_got_further_is_started_again() -> None:
    restarts = Restarts()
    assert restarts.again(15)
    assert restarts.again(20)


def test_crash_that_repeats_ends_the_run() -> None:
    assert not Restarts().again(0)
    restarts = Restarts()
    assert restarts.again(15)
    assert not restarts.again(15)


def test_there_is_an_end_to_it() -> None:
    restarts = Restarts()
    assert [restarts.again(step) for step in range(1, MAX_RESTARTS + 2)] == [True] * MAX_RESTARTS + [False]


def test_lost_replica_is_survived_while_another_serves() -> None:
    assert goes_on_without("replica-0", serving=1, training=True)
    assert not goes_on_without("replica-0", serving=0, training=True)
    assert not goes_on_without("replica-0", serving=1, training=False)
    assert not goes_on_without("trainer", serving=2, training=True)
