"""What a log says of the rollouts: how long they take, what the servers have of them, how they are scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkit.recipe import Recipe

Mean = Callable[[str], float | None]

# TRL's num_generations when the recipe is not known.
DEFAULT_GENERATIONS = 8


def rollout_signals(
    mean: Mean, recipe: Recipe | None, step_s: float | None, samples: float | None, dropped: float | None
) -> dict[str, Any]:
    """Fields of `Signals`. `mean` of a metric over the settled steps, `step_s` seconds and `samples` of a step."""
    rollout_s, tokens, score_s = mean("rollout/duration_s"), mean("completions/mean_length"), mean("rollout/score_s")
    preemptions = mean("rollout/vllm_preemptions_total")
    interval = 1 if recipe is None else recipe.rollout.weight_sync_steps
    finished = None if samples is None else samples * (1 + (dropped or 0.0))
    groups = None if finished is None else finished / _generations(recipe)
    usage = mean("rollout/kv_cache_usage")
    return {
        "rollout_s": rollout_s,
        "rollout_versions": _ratio(rollout_s, None if step_s is None else step_s * interval),
        "completion_tokens": tokens,
        "length_tail": _ratio(mean("completions/max_length"), tokens),
        "completion_token_s": _ratio(rollout_s, tokens),
        "admitted": mean("rollout/inflight_admitted"),
        "vllm_running": mean("rollout/vllm_running_requests"),
        "vllm_waiting": mean("rollout/vllm_queued_requests"),
        # Some pages say it in percent.
        "kv_cache_usage": usage if usage is None or usage <= 1 else usage / 100,
        "preemptions_per_sample": _ratio(without_clears(preemptions, mean, recipe), finished),
        "replica_speed_spread": mean("rollout/replica_speed_spread"),
        "replica_load_spread": mean("rollout/replica_load_spread"),
        "score_s": score_s,
        "score_busy": None if score_s is None or groups is None else _ratio(score_s * groups, step_s),
        "score_wait_s": mean("rollout/score_wait_s"),
        "clipped": mean("completions/clipped_ratio"),
        "reward_std": mean("reward_std"),
        "row_fill": mean("batch/row_fill_frac"),
    }


def without_clears(preemptions: float | None, mean: Mean, recipe: Recipe | None) -> float | None:
    """Preemptions of a step but for those of its sync: one that clears the cache preempts every running request."""
    if preemptions is None or recipe is None or recipe.transport.keep_cache:
        return preemptions
    running = mean("rollout/vllm_running_requests") or mean("rollout/inflight_admitted") or mean("rollout/inflight")
    return max(0.0, preemptions - (running or 0.0) / recipe.rollout.weight_sync_steps)


def _generations(recipe: Recipe | None) -> int:
    return DEFAULT_GENERATIONS if recipe is None else recipe.sampling.num_generations


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
