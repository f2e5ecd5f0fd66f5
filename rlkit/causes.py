"""Why a run is bound where it is, and which field of the recipe to change. Signals and recipe in, words out.

Each rule was drawn from a run in which its change was then made and paid off, or says so. They are tried in order: the
first that fits is the cause, because the later ones look alike while it lasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlkit.judgement import PINNED
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.wording import number, percent

# One sample per row, as with per_device_train_batch_size 1 and no token budget; two short ones are not worth a rule.
LONELY_SAMPLES_PER_ROW = 1.5

# A row of one sample is small below this many tokens: a device computes a row's tokens together, and too few leave it
# idle. Published: rows of 1,200 tokens reach 3.9 % MFU, rows of 15,600 reach 19 %; this is a quarter of the latter.
SMALL_ROW_TOKENS = 4096

# The published chase packs rows of four times max_model_len (16,384 for 4,096), on a GPU of 141 GB.
ROWS_OF_CONTEXTS = 4

# How full a packed row gets (batch/row_fill_frac of the published run 2).
PACKED_ROW_FILL = 0.95

# Forward and backward take 3 forwards, and 4 with the forward computed again; the published run with checkpointing
# shows 4.2, a real one where it hardly mattered 2.8.
RECOMPUTED_FORWARD = 3.5

# From here on a sync is worth naming beside the cause. Published: a quarter of the wall-clock was, 8 % was not.
LARGE_SYNC = 0.2

# One sample thrown away for every ten trained: generation that buys nothing. The published run without a cap threw 34 %
# away, those with one none.
MANY_DROPPED = 0.1

# A replica that may hold less than half of the sequences it has slots for is idle on the client's account: decoding is
# bound by memory bandwidth, more sequences in a step cost little. Published: 43 for each replica, then 128.
IDLE_SLOTS = 0.5

# vLLM's smallest default for max_num_seqs (0.31, a CPU; 256 or 1024 on GPUs), taken when the recipe leaves it open.
DEFAULT_SLOTS = 128

# The in-flight limit comes with a queue of at least twice its size, so that finished groups find room (published: 384
# and 768).
QUEUE_PER_INFLIGHT = 2


@dataclass(frozen=True)
class Cause:
    """What holds the slower side back, in a few words, and one sentence with the field to change."""

    text: str
    next_action: str


def trainer_cause(signals: Signals, recipe: Recipe | None) -> Cause:
    """Why the trainer is the slower side."""
    shares = signals.shares
    if _lonely_rows(signals):
        return Cause(f"tiny microbatches ({signals.samples_per_row:.1f} samples per row)", _pack(signals, recipe))
    if _recomputes(signals, recipe):
        return Cause(
            f"the forward pass is computed twice (forward+backward / forward = {signals.fwd_bwd_over_fwd:.1f})",
            "Set train.gradient_checkpointing=false if the activations of a row fit into memory.",
        )
    if shares and shares["weight_sync"] > shares["forward_backward"]:
        action = shorten_sync(signals, recipe)
        return Cause(
            f"the weight sync ({percent(shares['weight_sync'])} of the step)", f"{action[0].upper()}{action[1:]}."
        )
    if shares and shares["other"] > shares["forward_backward"]:
        return Cause(
            f"time outside the phases that TRL measures ({percent(shares['other'])} of the step)",
            "Raise train.save_steps if checkpoints are slow; otherwise profile the trainer (collation, logging).",
        )
    compute = "the trainer's own compute"
    if signals.mfu_fwd_bwd is not None:
        compute = f"compute at {signals.mfu_fwd_bwd:.3g} % MFU"
    action = "No setting makes the computation cheaper: add devices (train.processes), or accept this speed"
    if sync_is_large(signals):
        sync = f"{compute}, and the weight sync takes {_sync_share(signals)}"
        return Cause(sync, f"{action}; to shorten the sync, {shorten_sync(signals, recipe)}.")
    return Cause(compute, f"{action}.")


def generation_cause(signals: Signals, recipe: Recipe | None) -> Cause:
    """Why generation is the slower side."""
    dropped = signals.dropped_per_trained
    if dropped is not None and dropped >= MANY_DROPPED:
        return Cause(
            f"samples thrown away as stale ({number(100 * dropped)} for every 100 trained on)",
            "Admit fewer rollouts at once, so that they are finished before they are stale: cap.policy=rlkit, or a "
            f"lower rollout.max_inflight_tasks{_now(signals.inflight_limit)}.",
        )
    if (signals.score_blocked_steps or 0.0) >= 0.5 and not signals.blocked_steps:
        field = "reward" if recipe is None else f"reward ({recipe.reward})"
        return Cause(
            f"scoring: groups waited for the reward in {percent(signals.score_blocked_steps or 0.0)} of the steps",
            f"Make the {field} faster: it cannot keep up with generation.",
        )
    if recipe is not None and _client_limits(signals, recipe):
        return _raise_limit(signals, recipe)
    replicas = "more replicas" if recipe is None else f"more replicas than {recipe.serve.replicas}"
    text, action = "the replicas' generation rate", f"Raise serve.replicas ({replicas})"
    if sync_is_large(signals):
        return Cause(
            f"{text}, and the weight sync, which pauses them, takes {_sync_share(signals)}",
            f"{action}; to shorten the sync, {shorten_sync(signals, recipe)}.",
        )
    return Cause(text, f"{action}, or rollout.max_inflight_tasks while they have cache to spare.")


def shorten_sync(signals: Signals, recipe: Recipe | None) -> str:
    """What to do about a sync that takes too long, as a part of a sentence."""
    rarer = "raise rollout.weight_sync_steps (samples get staler)"
    if recipe is None or recipe.transport.kind != "bucket" or recipe.lora is None:
        return rarer
    # A sync that had to ask a replica again took at least one pause between attempts.
    loading = signals.weight_sync_s if signals.weight_sync_load_s is None else signals.weight_sync_load_s
    if loading is None or loading < recipe.transport.retry_s:
        return rarer
    return f"lower transport.retry_s ({recipe.transport.retry_s:g} s now) or {rarer}"


def _lonely_rows(signals: Signals) -> bool:
    if signals.samples_per_row is None or signals.samples_per_row > LONELY_SAMPLES_PER_ROW:
        return False
    tokens = signals.row_tokens or signals.sample_tokens
    return tokens is None or tokens < SMALL_ROW_TOKENS


def _pack(signals: Signals, recipe: Recipe | None) -> str:
    if recipe is None:
        return "Pack samples into rows: set train.token_budget, and lower train.gradient_accumulation_steps with it."
    budget = ROWS_OF_CONTEXTS * recipe.serve.max_model_len
    fewer = "lower train.gradient_accumulation_steps so that a step still trains as many samples"
    tokens = signals.sample_tokens or signals.row_tokens
    if tokens is not None and signals.samples_per_step is not None:
        rows = signals.samples_per_step * tokens / (budget * PACKED_ROW_FILL * recipe.train.processes)
        fewer = f"train.gradient_accumulation_steps={max(1, math.ceil(rows))}"
    return f"Pack samples into rows: train.token_budget={budget} (four longest sequences), and {fewer}."


def _recomputes(signals: Signals, recipe: Recipe | None) -> bool:
    on = recipe is None or recipe.train.gradient_checkpointing
    return on and signals.fwd_bwd_over_fwd is not None and signals.fwd_bwd_over_fwd >= RECOMPUTED_FORWARD


def sync_is_large(signals: Signals) -> bool:
    """Whether the weight sync takes a part of the step that is worth naming."""
    return signals.sync_share is not None and signals.sync_share >= LARGE_SYNC


def _sync_share(signals: Signals) -> str:
    bound = "up to " if signals.step_s is None else ""
    return f"{bound}{percent(signals.sync_share or 0.0)} of the step"


def _client_limits(signals: Signals, recipe: Recipe) -> bool:
    limit = recipe.inflight_limit
    if signals.inflight is None:
        return False
    capped = recipe.cap.policy != "none" and (signals.inflight_cap is None or signals.inflight_cap < PINNED * limit)
    if capped:
        return False  # the gauge still reads the limit, but the cap decides
    idle = limit <= IDLE_SLOTS * _slots(recipe)
    return signals.inflight >= PINNED * limit and idle and _useful_inflight(signals, recipe) > limit


def _useful_inflight(signals: Signals, recipe: Recipe) -> int:
    """The most rollouts in flight that still pay: a slot for each, and trained on before they are too stale."""
    return math.floor(min(_slots(recipe), _samples_in_time(signals, recipe)))


def _samples_in_time(signals: Signals, recipe: Recipe) -> float:
    """Samples that are trained on before they are too stale, infinite when a step's size is unknown.

    TRL's own formula for max_inflight_tasks -1 (AsyncGRPOTrainer.__init__), which takes every step to sync.
    """
    if signals.samples_per_step is None:
        return math.inf
    return max(recipe.rollout.max_staleness, 1) * recipe.rollout.weight_sync_steps * signals.samples_per_step


def _raise_limit(signals: Signals, recipe: Recipe) -> Cause:
    limit, engines = recipe.inflight_limit, _engines(recipe)
    # As many for each replica as there were for all of them, or what the waiting says is missing: without the waits the
    # trainer would take samples 1 / (1 - wait) times as fast.
    wait = min(signals.wait_share or 0.0, 0.99)
    target = min(math.ceil(limit * max(2.0, engines, 1 / (1 - wait))), _useful_inflight(signals, recipe))
    room = min(QUEUE_PER_INFLIGHT * target, _samples_in_time(signals, recipe) - target)
    queue = max(recipe.rollout.queue_maxsize, math.floor(room))
    action = f"Raise rollout.max_inflight_tasks from {limit} to {target}"
    if queue != recipe.rollout.queue_maxsize:
        action += f" and rollout.queue_maxsize from {recipe.rollout.queue_maxsize} to {queue}"
    shared = f" for {engines} replicas: {limit / engines:,.0f} each" if engines > 1 else ""
    return Cause(f"the client's in-flight limit (rollout.max_inflight_tasks {limit}{shared})", f"{action}.")


def _slots(recipe: Recipe) -> int:
    """Sequences that all replicas together may run at once."""
    return (recipe.serve.max_num_seqs or DEFAULT_SLOTS) * _engines(recipe)


def _engines(recipe: Recipe) -> int:
    return recipe.serve.replicas * recipe.serve.data_parallel_size


def _now(limit: float | None) -> str:
    return "" if limit is None else f" ({number(limit)} now)"
