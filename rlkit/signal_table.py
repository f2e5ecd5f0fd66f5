"""Every signal of a verdict with its unit, the metrics it was read from, and what it means to somebody new to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from rlkit.diagnosis import Verdict


class Meaning(NamedTuple):
    """Unit, origin (TRL's or rlkit's metric names; `recipe` for a field of the recipe) and one sentence."""

    unit: str
    origin: str
    says: str


MEANINGS: Mapping[str, Meaning] = {
    "steps": Meaning("steps", "rows", "Steps after the warm-up that the verdict rests on."),
    "step_s": Meaning("s", "perf/step_s", "From the end of one optimizer step to the end of the next."),
    "fwd_bwd_s": Meaning("s", "perf/fwd_bwd_s", "The trainer computes: forward and backward passes of a step."),
    "fwd_bwd_over_fwd": Meaning(
        "1", "perf/fwd_bwd_s / perf/fwd_s", "3 is due; 4 when the forward pass is computed a second time."
    ),
    "rollout_wait_s": Meaning("s", "perf/rollout_wait_s", "The trainer waits for samples."),
    "wait_share": Meaning("of the step", "perf/rollout_wait_s / perf/step_s", "High when generation is too slow."),
    "least_wait_share": Meaning(
        "of the step",
        "perf/rollout_wait_s, lowest tenth / perf/step_s",
        "Fetching samples that are ready takes time as well: this much even in the step that waits least.",
    ),
    "weight_sync_s": Meaning("s", "perf/weight_sync_s", "One transfer of the policy to the replicas; both sides stop."),
    "weight_sync_load_s": Meaning(
        "s",
        "perf/weight_sync_{s,pause_s,barrier_s,transfer_s}",
        "Of it, from the saved adapter to resumed replicas, with every attempt that came too early.",
    ),
    "weight_sync_per_step_s": Meaning("s", "perf/weight_sync_s", "The same, spread over the steps between two."),
    "sync_share": Meaning("of the step", "perf/weight_sync_s / perf/step_s", "What the sync costs on average."),
    "pause_share": Meaning(
        "of the step",
        "perf/weight_sync_pause_s / perf/step_s",
        "Of it, stopping the replicas: they generate for about half of this time.",
    ),
    "phases_over_step": Meaning("1", "sum of perf/*_s / perf/step_s", "Above 1 the times cannot be of one run."),
    "queue_size": Meaning("samples", "sample/rollout_queue_size", "Finished samples that wait for the trainer."),
    "queue_maxsize": Meaning("samples", "recipe: rollout.queue_maxsize", "How many may."),
    "queue_full_reading": Meaning(
        "samples", "queue_maxsize - samples_per_step / 2", "What the gauge reads on average when the queue is full."
    ),
    "queue_fill": Meaning(
        "1", "queue_size / queue_full_reading", "Near 1 the trainer is slower, near 0 generation is."
    ),
    "blocked_steps": Meaning(
        "of the steps", "rollout/backpressure_s", "Steps in which a finished sample found the queue full."
    ),
    "backpressure_s": Meaning("s", "rollout/backpressure_s", "How long such a sample waited; a mean over those only."),
    "score_blocked_steps": Meaning(
        "of the steps", "rollout/score_block_s", "Steps in which groups waited to be scored."
    ),
    "inflight": Meaning(
        "rollouts", "rollout/inflight", "Rollouts the worker has begun and not collected; not what vLLM runs."
    ),
    "inflight_limit": Meaning("rollouts", "recipe: rollout.max_inflight_tasks", "How many there may be."),
    "inflight_cap": Meaning("rollouts", "rollout/inflight_cap", "How many the admission cap lets through."),
    "generated_tok_s": Meaning("tok/s", "rollout/generated_tok_s", "Generated; no capacity while the queue is full."),
    "usable_tok_s": Meaning(
        "tok/s", "batch/forwarded_tokens_per_step / busy seconds", "What a trainer that never waited could take."
    ),
    "mfu_fwd_bwd": Meaning("%", "perf/mfu_fwd_bwd", "Part of the device's peak while it computes."),
    "mfu_wall_clock": Meaning("%", "perf/mfu_wall_clock", "The same, waits and syncs included."),
    "mfu_ratio": Meaning("1", "perf/mfu_wall_clock / perf/mfu_fwd_bwd", "The part of the time that computes."),
    "samples_per_step": Meaning("samples", "batch/samples_per_step", "Trained on in a step."),
    "samples_per_row": Meaning("samples", "batch/samples_per_row", "Packed into one row of a microbatch."),
    "row_tokens": Meaning("tokens", "batch/row_tokens_mean", "In a row; few of them leave the device idle."),
    "sample_tokens": Meaning("tokens", "sample/forwarded_tokens_mean", "In a sample, its prompt included."),
    "staleness_mean": Meaning("versions", "sample/staleness_mean", "Updates since the sample's group was begun."),
    "staleness_max": Meaning("versions", "sample/staleness_max", "The oldest that was trained on."),
    "dropped_per_trained": Meaning(
        "1", "sample/dropped_stale_total / batch/samples_per_step", "Thrown away as too old, for each trained on."
    ),
    "rollout_s": Meaning("s", "rollout/duration_s", "One rollout, from admission to its end."),
    "rollout_versions": Meaning("versions", "rollout/duration_s / perf/step_s", "Policy updates in that time."),
    "completion_tokens": Meaning("tokens", "completions/mean_length", "Generated by a rollout."),
    "length_tail": Meaning(
        "1", "completions/max_length / completions/mean_length", "A group is ready when its longest completion is."
    ),
    "completion_token_s": Meaning(
        "s", "rollout/duration_s / completions/mean_length", "A token of one rollout, waits in the server included."
    ),
    "admitted": Meaning("rollouts", "rollout/inflight_admitted", "Past the admission gate."),
    "vllm_running": Meaning("requests", "rollout/vllm_running_requests", "Being decoded, all replicas together."),
    "vllm_waiting": Meaning("requests", "rollout/vllm_queued_requests", "In the servers, and not being decoded."),
    "arrived_most": Meaning(
        "requests",
        "rollout/vllm_running_requests + rollout/vllm_queued_requests, highest step",
        "A pool of connections that is too small is never exceeded.",
    ),
    "kv_cache_usage": Meaning("1", "rollout/kv_cache_usage", "How full the fullest replica's KV cache is."),
    "preemptions_per_sample": Meaning(
        "1", "rollout/vllm_preemptions_total", "Times a rollout was thrown out of the cache, but for clears by a sync."
    ),
    "replica_speed_spread": Meaning(
        "1",
        "rollout/replica_speed_spread",
        "How much fewer tokens the slowest replica gives each of its requests than the others do.",
    ),
    "replica_load_spread": Meaning(
        "1", "rollout/replica_load_spread", "Requests of the busiest replica less those of the idlest, over the mean."
    ),
    "score_s": Meaning("s", "rollout/score_s", "The reward of one group."),
    "score_busy": Meaning("of the time", "rollout/score_s x groups / perf/step_s", "Near 1 the reward is too slow."),
    "score_wait_s": Meaning("s", "rollout/score_wait_s", "A finished group waits to be scored."),
    "clipped": Meaning("of the completions", "completions/clipped_ratio", "Near 1 the length limit is too low."),
    "reward_std": Meaning("reward", "reward_std", "Within groups; near 0 there is nothing to learn from."),
    "row_fill": Meaning("1", "batch/row_fill_frac", "Part of train.token_budget that a row uses."),
}


def signal_table(verdict: Verdict) -> pd.DataFrame:
    """A row per signal that is known: signal, value, unit, origin, what it says."""
    rows = [
        (name, value, *MEANINGS[name])
        for name, value in verdict.signals.items()
        if value is not None and name in MEANINGS
    ]
    return pd.DataFrame(rows, columns=["signal", "value", "unit", "origin", "says"])
