"""Sides beside trainer and generation, and the causes that need the servers' own figures or known hardware."""

from __future__ import annotations

import pandas as pd
import pytest

from rlkit.diagnosis import Verdict, diagnose
from rlkit.recipe import Recipe, parse_recipe

WAITING = {"perf/step_s": 2.0, "perf/fwd_bwd_s": 0.5, "perf/rollout_wait_s": 1.2, "perf/optimizer_s": 0.1,
           "perf/weight_sync_s": 0.2, "sample/rollout_queue_size": 10.0, "batch/samples_per_step": 64.0,
           "rollout/inflight": 64.0, "sample/staleness_mean": 1.0}  # fmt: skip


def gpu_recipe(*overrides: str) -> Recipe:
    data = {
        "name": "h200",
        "model": {"name": "Qwen/Qwen2.5-Math-1.5B"},
        "data": {"name": "any"},
        "reward": "rlkit.training.rewards:boxed_math",
        "train": {"steps": 100, "token_budget": 16384},
        "rollout": {"max_inflight_tasks": 64, "queue_maxsize": 256},
        "serve": {"max_model_len": 4096},
        "cap": {"policy": "none"},
        "hardware": {"trainer": "h200", "replica": "h200"},
    }
    return parse_recipe(data, "test").with_overrides(list(overrides))


def verdict(*overrides: str, **changed: float | None) -> Verdict:
    row = WAITING | {name.replace("__", "/"): value for name, value in changed.items()}
    frame = pd.DataFrame([row] * 60, index=pd.RangeIndex(1, 61, name="global_step"))
    return diagnose(frame, gpu_recipe(*overrides))


def first(found: Verdict) -> tuple[str, str]:
    return found.bound, found.causes[0].name


def test_requests_that_all_arrive_in_some_steps_lack_no_connections() -> None:
    """The main job's readings: 48 of 64 on average, because its rollouts are short, and 62 at most."""
    gauges = {"rollout/inflight_admitted": 64.0, "rollout/vllm_queued_requests": 0.0, "rollout/kv_cache_usage": 0.001}
    rows = [WAITING | gauges | {"rollout/vllm_running_requests": float(n)} for n in (33, 48, 62) * 20]
    frame = pd.DataFrame(rows, index=pd.RangeIndex(1, 61, name="global_step"))
    named = {cause.name for cause in diagnose(frame, gpu_recipe()).causes}
    assert "connections" not in named
    frame["rollout/vllm_running_requests"] = 48.0
    assert "connections" in {cause.name for cause in diagnose(frame, gpu_recipe()).causes}
    # On starved cores fewer arrive in every step, but not always as many.
    frame["rollout/vllm_running_requests"] = [30.0, 40.0, 53.0] * 20
    assert "connections" not in {cause.name for cause in diagnose(frame, gpu_recipe()).causes}


def test_a_sync_that_takes_most_of_the_step_bounds_it() -> None:
    found = verdict(perf__weight_sync_s=1.3, perf__rollout_wait_s=0.1)

    assert first(found) == ("sync", "sync")
    assert found.headline == "Sync-bound: the weight sync takes 65 % of the step, more than training or generation."
    assert "rollout.weight_sync_steps from 1 to 2" in found.next_action


def test_a_sync_near_the_rest_is_named_with_less_confidence() -> None:
    assert verdict(perf__weight_sync_s=1.05, perf__rollout_wait_s=0.3).confidence == "low"
    assert verdict(perf__weight_sync_s=1.3, perf__rollout_wait_s=0.1).confidence != "low"


def test_a_sync_between_equals_bounds_the_run() -> None:
    """The trainer hardly waits and the queue is not full: neither side is the slower one."""
    found = verdict(perf__fwd_bwd_s=1.0, perf__rollout_wait_s=0.02, perf__weight_sync_s=0.8)

    assert found.bound == "sync"
    assert verdict(perf__fwd_bwd_s=1.4, perf__rollout_wait_s=0.02, perf__weight_sync_s=0.4).bound == "balanced"


def test_a_reward_that_is_always_being_computed_bounds_the_run() -> None:
    """Eight groups a step, 0.24 s each: 1.92 of 2 seconds."""
    found = verdict(rollout__score_s=0.24)

    assert first(found) == ("scoring", "scoring")
    assert "a group is being scored 96 % of the time" in found.headline
    assert first(verdict(rollout__score_s=0.1))[0] == "generation"


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        # 4 ms a token, 3.6 of them whatever runs beside it.
        ({"rollout__duration_s": 4.0, "completions__mean_length": 1000.0}, "client-limit"),
        # 8 ms a token.
        ({"rollout__duration_s": 8.0, "completions__mean_length": 1000.0}, "replicas"),
        ({"rollout__vllm_preemptions_total": 200.0}, "over-admission"),
        (
            {
                "rollout__kv_cache_usage": 0.95,
                "rollout__vllm_running_requests": 40.0,
                "rollout__vllm_queued_requests": 24.0,
                "rollout__inflight_admitted": 64.0,
            },
            "over-admission",
        ),
        (
            {
                "rollout__kv_cache_usage": 0.2,
                "rollout__vllm_running_requests": 20.0,
                "rollout__vllm_queued_requests": 0.0,
                "rollout__inflight_admitted": 64.0,
            },
            "connections",
        ),
        ({"sample__dropped_stale_total": 20.0, "rollout__inflight": 30.0}, "stale"),
        (
            {
                "sample__dropped_stale_total": 20.0,
                "rollout__inflight": 30.0,
                "rollout__duration_s": 2.4,
                "completions__mean_length": 400.0,
                "completions__max_length": 1600.0,
            },
            "long-tail",
        ),
    ],
)
def test_causes_of_slow_generation(changed: dict[str, float], cause: str) -> None:
    assert first(verdict(**changed)) == ("generation", cause)


def test_a_queue_beyond_the_staleness_window_is_named() -> None:
    """Two steps of 64 are trained on in time, and 200 of a queue of 512 wait."""
    found = verdict(
        "rollout.queue_maxsize=512", "rollout.max_staleness=2", "serve.max_loras=4",
        perf__fwd_bwd_s=1.6, perf__rollout_wait_s=0.01, sample__rollout_queue_size=460.0,
        sample__dropped_stale_total=20.0, rollout__backpressure_s=0.5,
    )  # fmt: skip

    assert found.bound == "trainer"
    assert "queue" in {cause.name for cause in found.causes}
    assert any("rollout.queue_maxsize from 512 to 128" in cause.next_action for cause in found.causes)


def test_rows_that_are_mostly_fixed_time_are_tiny() -> None:
    busy = {"perf__fwd_bwd_s": 1.6, "perf__rollout_wait_s": 0.01, "sample__rollout_queue_size": 220.0}

    assert first(verdict(**busy, batch__row_tokens_mean=3000.0)) == ("trainer", "tiny-rows")
    assert first(verdict(**busy, batch__row_tokens_mean=15000.0)) == ("trainer", "compute")


def test_what_would_change_it_is_said_of_every_side() -> None:
    assert all(
        "It would be" in found.would_change
        for found in (verdict(), verdict(rollout__score_s=0.24), verdict(perf__weight_sync_s=1.3))
    )
    assert verdict().probability == 0.9


@pytest.mark.parametrize(("samples", "words"), [(64.0, "1.3 steps' samples (84)"), (None, "1.3 steps' samples and")])
def test_what_would_change_a_trainer_s_verdict_is_said_in_samples(samples: float | None, words: str) -> None:
    busy = {"perf__fwd_bwd_s": 1.6, "perf__rollout_wait_s": 0.01, "sample__rollout_queue_size": 220.0}

    assert words in verdict(**busy, batch__samples_per_step=samples).would_change
