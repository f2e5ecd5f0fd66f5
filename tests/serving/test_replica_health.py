from __future__ import annotations

from rlkit.serving.replica_health import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    MAX_FAILURES,
    STEADY_S,
    WINDOW,
    Outcomes,
    ReplicaHealth,
)


def test_a_replica_goes_after_failures_in_a_row() -> None:
    health = ReplicaHealth(2)
    assert [health.failed(0) for _ in range(MAX_FAILURES + 1)] == [False] * (MAX_FAILURES - 1) + [True, True]
    assert not health.failed(1)


def test_an_answer_starts_the_count_over() -> None:
    health = ReplicaHealth(1)
    for _ in range(5):
        assert not health.failed(0)
        assert not health.failed(0)
        assert not health.answered(0, 200)


def test_a_replica_that_fails_every_other_request_goes_too() -> None:
    health = ReplicaHealth(1)
    has_to_go = [health.failed(0) or health.answered(0, 200) for _ in range(WINDOW)]
    assert True in has_to_go
    assert has_to_go.index(True) == WINDOW // 2 - 1


def test_a_few_failures_among_many_answers_are_no_reason() -> None:
    health = ReplicaHealth(1)
    for _ in range(200):
        assert not health.failed(0)
        assert not any(health.answered(0, 200) for _ in range(2))


def test_a_client_error_never_counts_against_a_replica() -> None:
    health = ReplicaHealth(1)
    assert not any(health.answered(0, 404) for _ in range(100))
    assert [health.answered(0, 500) for _ in range(MAX_FAILURES)][-1]


def test_a_recovered_replica_starts_over() -> None:
    health = ReplicaHealth(1)
    for _ in range(WINDOW):
        health.failed(0)
    health.recovered(0, 0.0)
    assert [health.failed(0) for _ in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [True]


def test_a_replica_may_return_at_once_the_first_time() -> None:
    health = ReplicaHealth(2)
    health.recovered(0, 0.0)
    health.went(0, STEADY_S)
    assert health.may_return(0, STEADY_S)
    assert health.may_return(1, 0.0)


def test_one_that_fails_again_is_left_alone_for_longer_and_longer() -> None:
    health = ReplicaHealth(1)
    now, waits = 0.0, []
    for _ in range(10):
        health.recovered(0, now)
        health.went(0, now)
        start = now
        while not health.may_return(0, now):
            now += 0.5
        waits.append(now - start)
    assert waits[:4] == [FIRST_WAIT_S, 2, 4, 8]
    assert waits[-1] == LONGEST_WAIT_S
    health.recovered(0, now)
    health.went(0, now + STEADY_S)
    assert health.may_return(0, now + STEADY_S)


def test_outcomes_are_counted() -> None:
    outcomes = Outcomes()
    outcomes.count("completed")
    outcomes.count("cancelled")
    outcomes.count("cancelled")
    assert outcomes == Outcomes(completed=1, cancelled=2)
