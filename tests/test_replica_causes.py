from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_runs import recipe

from rlkit.generation_causes import generation_causes
from rlkit.replica_causes import slow_replica_cause, slow_replica_gain, unbalanced_cause
from rlkit.signals import Signals

TWO = recipe().with_overrides(["engine=sim", "serve.replicas=2"])
FOUR = recipe().with_overrides(["engine=sim", "serve.replicas=4"])


def test_one_of_two_at_half_the_speed_costs_a_third_of_what_both_could() -> None:
    signals = Signals(replica_speed_spread=0.5, step_s=10.0, sync_share=0.1, rollout_wait_s=8.0)

    assert slow_replica_gain(signals, TWO) == pytest.approx(1 / 3)
    assert slow_replica_gain(signals, FOUR) == pytest.approx(1 / 7)
    assert slow_replica_gain(Signals(replica_speed_spread=1.0), FOUR) == pytest.approx(1 / 3)
    cause = slow_replica_cause(signals, TWO)
    assert cause is not None
    assert cause.seconds == pytest.approx(10.0 * 0.9 / 4)
    assert "50 % fewer tokens" in cause.text
    assert "generate 33 % more" in cause.next_action


@pytest.mark.parametrize("spread", [None, 0.0, 0.15])
def test_replicas_that_differ_a_little_are_no_cause(spread: float | None) -> None:
    assert slow_replica_cause(Signals(replica_speed_spread=spread), TWO) is None


@pytest.mark.parametrize(("each", "named"), [(2, False), (4, False), (8, False), (32, True)])
def test_replicas_that_have_few_requests_look_unlike_by_chance(each: int, named: bool) -> None:
    signals = Signals(replica_speed_spread=0.22, vllm_running=2.0 * each)

    assert (slow_replica_cause(signals, TWO) is not None) == named


def test_a_single_replica_is_never_the_slow_one() -> None:
    assert slow_replica_cause(Signals(replica_speed_spread=0.9), TWO.with_overrides(["serve.replicas=1"])) is None


def test_replicas_of_one_machine_take_from_each_other() -> None:
    shared = TWO.with_overrides(["engine=local"])
    assert slow_replica_cause(Signals(replica_speed_spread=0.5, step_s=10.0), TWO) is not None
    assert slow_replica_cause(Signals(replica_speed_spread=0.5, step_s=10.0), shared) is None


def test_what_a_slow_replica_costs_is_no_more_than_the_trainer_waits() -> None:
    cause = slow_replica_cause(Signals(replica_speed_spread=0.5, step_s=10.0, rollout_wait_s=1.0), TWO)

    assert cause is not None
    assert cause.seconds == 1.0


def test_uneven_load_is_a_cause_where_it_makes_requests_wait() -> None:
    crowded = Signals(replica_load_spread=0.8, kv_cache_usage=0.97, vllm_waiting=20.0, vllm_running=20.0)

    uneven = unbalanced_cause(crowded, TWO)
    assert uneven is not None
    assert "routing.spill_threshold" in uneven.next_action
    assert unbalanced_cause(replace(crowded, replica_load_spread=0.2), TWO) is None
    assert unbalanced_cause(Signals(replica_load_spread=0.8), TWO) is None


def test_a_slow_replica_comes_before_the_client_s_limit_and_more_replicas() -> None:
    limited = Signals(replica_speed_spread=0.6, inflight=64.0, wait_share=0.5, rollout_wait_s=5.0, step_s=10.0)

    causes = [cause.name for cause in generation_causes(limited, TWO)]
    assert causes[0] == "slow-replica"
    assert causes[-1] == "replicas"
