"""What a run survives."""

from __future__ import annotations

import pytest

from rlkit.engines.hf_recovery import (
    MAX_REPLACEMENTS,
    MAX_RESTARTS,
    Replacements,
    Restarts,
    goes_on_without,
    is_way_broken,
)

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


def test_replica_that_served_is_replaced() -> None:
    assert Replacements().again("replica-0", served=True, step=0)
    assert not Replacements().again("replica-0", served=False, step=7)


def test_replica_that_dies_without_a_step_in_between_is_given_up() -> None:
    replacements = Replacements()
    for _ in range(MAX_REPLACEMENTS):
        assert replacements.again("replica-0", served=True, step=5)
    assert not replacements.again("replica-0", served=True, step=5)
    assert replacements.again("replica-1", served=True, step=5)
    assert replacements.again("replica-0", served=True, step=6)


def test_run_goes_on_with_what_is_left_once_it_took_a_step() -> None:
    assert goes_on_without(serving=1, step=1)
    assert not goes_on_without(serving=0, step=1)
    assert not goes_on_without(serving=1, step=0)


def test_replicas_that_all_fall_silent_at_once_are_not_replaced() -> None:
    assert is_way_broken(answering=0, alive=2)
    assert not is_way_broken(answering=1, alive=2)
    assert not is_way_broken(answering=0, alive=1)
