"""The sentences under a verdict, each with the number it is about. A signal that was not logged has no sentence."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from rlkit.judgement import queue_state, supply
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.wording import number, percent

PHASE_WORDS = {
    "forward_backward": "forward+backward",
    "rollout_wait": "waiting for rollouts",
    "weight_sync": "the weight sync",
    "optimizer": "the optimizer",
    "other": "everything else",
}


class Evidence(BaseModel):
    """One observation: a sentence with its number and unit, and the TRL metric it was read from."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    sentence: str
    metric: str
    value: float
    unit: str


def evidence_of(signals: Signals, recipe: Recipe | None) -> list[Evidence]:
    """Everything the log says about who waits for whom, most telling first."""
    parts = (_step, _queue, _rollouts, _servers, _replicas, _trainer, _sync, _freshness)
    return [item for part in parts for item in part(signals, recipe)]


def _say(metric: str, value: float, unit: str, sentence: str) -> Evidence:
    return Evidence(sentence=sentence, metric=metric, value=value, unit=unit)


def _step(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.step_s is not None and s.shares:
        parts = ", ".join(f"{PHASE_WORDS[name]} {percent(share)}" for name, share in s.shares.items() if share > 0)
        sentence = f"A step takes {number(s.step_s)} s on average over {s.steps} steps: {parts}."
        yield _say("perf/step_s", s.step_s, "s", sentence)
    elif s.step_s is not None and s.phases_over_step is not None:
        sentence = f"The phases in the log add up to {percent(s.phases_over_step)} of the step's {number(s.step_s)} s."
        yield _say("perf/step_s", s.step_s, "s", sentence)
    if s.rollout_wait_s is not None and s.wait_share is not None:
        bound = "" if s.step_s is not None else "at most "
        why = "" if s.step_s is not None else " (perf/step_s is not logged, the phases that are set a lower bound)"
        sentence = f"The trainer waits {number(s.rollout_wait_s)} s a step, {bound}{percent(s.wait_share)} of it{why}."
        yield _say("perf/rollout_wait_s", s.rollout_wait_s, "s", sentence)


def _queue(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.queue_size is not None:
        full = ""
        if s.queue_full_reading is not None and s.queue_maxsize is not None:
            full = f"; when full it reads about {number(s.queue_full_reading)} of its {number(s.queue_maxsize)}"
        sentence = f"The rollout queue holds {number(s.queue_size)} samples{full}."
        yield _say("sample/rollout_queue_size", s.queue_size, "samples", sentence)
    if s.blocked_steps == 0 and queue_state(s) != "full":
        yield _say("rollout/backpressure_s", 0.0, "s", "No finished rollout was ever held back by a full queue.")
    elif s.blocked_steps is not None and s.backpressure_s is not None:
        sentence = (
            f"In {percent(s.blocked_steps)} of the steps finished rollouts are held back by a full queue, "
            f"{number(s.backpressure_s)} s each."
        )
        yield _say("rollout/backpressure_s", s.backpressure_s, "s", sentence)


def _rollouts(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.inflight is not None and recipe is not None:
        engines = recipe.serve.engines
        each = f", {s.inflight / engines:,.0f} for each of {engines} replicas" if engines > 1 else ""
        sentence = f"{number(s.inflight)} rollouts are in flight at a limit of {recipe.inflight_limit:,}{each}."
        yield _say("rollout/inflight", s.inflight, "rollouts", sentence)
    if s.generated_tok_s is not None and s.usable_tok_s is not None and supply(s) is not None:
        sentence = (
            f"The replicas generate {number(s.generated_tok_s)} tok/s; a trainer that never waited could use up to "
            f"{number(s.usable_tok_s)} tok/s (prompts included)."
        )
        yield _say("rollout/generated_tok_s", s.generated_tok_s, "tok/s", sentence)


def _servers(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.vllm_running is not None and s.vllm_waiting is not None:
        sentence = f"The servers run {number(s.vllm_running)} requests, and {number(s.vllm_waiting)} wait in them."
        yield _say("rollout/vllm_queued_requests", s.vllm_waiting, "requests", sentence)
    if s.kv_cache_usage is not None:
        sentence = f"The fullest KV cache is {percent(s.kv_cache_usage)} in use."
        yield _say("rollout/kv_cache_usage", s.kv_cache_usage, "of the cache", sentence)
    if s.preemptions_per_sample:
        sentence = f"{number(s.preemptions_per_sample)} preemptions come on each sample, those of syncs not counted."
        yield _say("rollout/vllm_preemptions_total", s.preemptions_per_sample, "per sample", sentence)


def _replicas(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.replica_speed_spread is not None:
        slower = f"{percent(s.replica_speed_spread)} fewer tokens than the others do"
        sentence = f"The slowest replica gives each of its requests {slower}."
        yield _say("rollout/replica_speed_spread", s.replica_speed_spread, "of the others' tokens", sentence)


def _trainer(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.mfu_fwd_bwd is not None:
        gap = ""
        if s.mfu_wall_clock is not None and s.mfu_ratio is not None:
            wall = number(s.mfu_wall_clock)
            gap = f" and {wall} % over the wall-clock: it computes for {percent(s.mfu_ratio)} of the time"
        sentence = f"The trainer reaches {number(s.mfu_fwd_bwd)} % MFU in forward+backward{gap}."
        yield _say("perf/mfu_fwd_bwd", s.mfu_fwd_bwd, "%", sentence)
    if s.samples_per_row is not None:
        tokens = "" if s.row_tokens is None else f" ({number(s.row_tokens)} tokens)"
        sentence = f"A row of a microbatch holds {s.samples_per_row:.1f} samples{tokens}."
        yield _say("batch/samples_per_row", s.samples_per_row, "samples", sentence)
    if s.fwd_bwd_over_fwd is not None:
        sentence = (
            f"Forward+backward takes {s.fwd_bwd_over_fwd:.1f} times the forward pass; 3 is due, 4 when the forward is "
            "computed again."
        )
        yield _say("perf/fwd_s", s.fwd_bwd_over_fwd, "times", sentence)


def _sync(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.weight_sync_s is None:
        return
    every = spread = ""
    if recipe is not None:
        steps = recipe.rollout.weight_sync_steps
        every = ", every step" if steps == 1 else f", every {steps} steps"
    if s.weight_sync_per_step_s is not None and s.sync_share is not None:
        bound = "" if s.step_s is not None else "at most "
        spread = f": {number(s.weight_sync_per_step_s)} s a step, {bound}{percent(s.sync_share)} of it"
    sentence = f"A weight sync takes {number(s.weight_sync_s)} s{every}{spread}."
    yield _say("perf/weight_sync_s", s.weight_sync_s, "s", sentence)


def _freshness(s: Signals, recipe: Recipe | None) -> Iterator[Evidence]:
    if s.staleness_mean is not None:
        most = "" if s.staleness_max is None else f", {number(s.staleness_max)} at most"
        limit = "" if recipe is None else f" ({recipe.rollout.max_staleness} are allowed)"
        sentence = f"A sample is {number(s.staleness_mean)} policy versions old when trained on{most}{limit}."
        yield _say("sample/staleness_mean", s.staleness_mean, "versions", sentence)
    if s.dropped_per_trained:
        dropped = number(100 * s.dropped_per_trained)
        sentence = f"{dropped} samples are thrown away as stale for every 100 trained on."
        yield _say("sample/dropped_stale_total", s.dropped_per_trained, "per sample trained on", sentence)
