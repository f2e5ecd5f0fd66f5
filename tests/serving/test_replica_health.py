from __future__ import annotations

from rlkit.serving.replica_health import MAX_FAILURES, Outcomes, ReplicaHealth


def test_a_replica_goes_after_failures_in_a_row_and_is_told_once() -> None:
    health = ReplicaHealth(2)
    assert [health.failed(0) for _ in range(MAX_FAILURES + 2)] == [False] * (MAX_FAILURES - 1) + [True, False, False]
    assert not health.failed(1)


def test_an_answer_starts_the_count_over() -> None:
    health = ReplicaHealth(1)
    for _ in range(10):
        assert not health.failed(0)
        assert not health.failed(0)
        assert not health.answered(0, 200)


def test_a_client_error_never_counts_against_a_replica() -> None:
    health = ReplicaHealth(1)
    assert not any(health.answered(0, 404) for _ in range(100))
    assert [health.answered(0, 500) for _ in range(MAX_FAILURES)][-1]


def test_a_recovered_replica_can_go_again() -> None:
    health = ReplicaHealth(1)
    for _ in range(MAX_FAILURES):
        health.failed(0)
    health.recovered(0)
    assert [health.failed(0) for _ in range(MAX_FAILURES)][-1]


def test_outcomes_are_counted() -> None:
    outcomes = Outcomes()
    outcomes.count("completed")
    outcomes.count("cancelled")
    outcomes.count("cancelled")
    assert outcomes == Outcomes(completed=1, cancelled=2)
