"""Why the trainer is the slower side."""

from __future__ import annotations

from rlkit.cause import Cause
from rlkit.decoding import rows as known_rows
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.sizing import longer_rows, situation
from rlkit.wording import percent

# One sample per row, as with per_device_train_batch_size 1 and no token budget; two short ones are not worth a rule.
LONELY_SAMPLES_PER_ROW = 1.5

# A row of one sample is small below this many tokens: a device computes a row's tokens together, and too few leave it
# idle. Published: rows of 1,200 tokens reach 3.9 % MFU, rows of 15,600 reach 19 %; this is a quarter of the latter.
SMALL_ROW_TOKENS = 4096

# Forward and backward take 3 forwards, and 4 with the forward computed again; the published run with checkpointing
# shows 4.2, a real one where it hardly mattered 2.8.
RECOMPUTED_FORWARD = 3.5


def trainer_causes(signals: Signals, recipe: Recipe | None) -> list[Cause]:
    """Always at least one."""
    found = [cause for rule in (_tiny_rows, _recompute, _other) if (cause := rule(signals, recipe)) is not None]
    return [*found, _compute(signals, sum(cause.seconds or 0.0 for cause in found if cause.name != "other"))]


def _tiny_rows(signals: Signals, recipe: Recipe | None) -> Cause | None:
    tokens = signals.row_tokens or (signals.sample_tokens if _lonely(signals) else None)
    known = None if recipe is None else known_rows(recipe)
    # A row's fixed time is more than half of it below this many tokens.
    small = SMALL_ROW_TOKENS if known is None else known.row_s / known.token_s
    if not (_lonely(signals) if known is None or tokens is None else True) or (tokens is not None and tokens >= small):
        return None
    if tokens is None and signals.samples_per_row is None:
        return None
    fixed = None if known is None or tokens is None else known.row_s / (known.row_s + known.token_s * tokens)
    cost = None if signals.fwd_bwd_s is None or fixed is None else fixed * signals.fwd_bwd_s
    if signals.samples_per_row is None:
        text = f"tiny microbatches (rows of {tokens:,.0f} tokens)"
    else:
        text = f"tiny microbatches ({signals.samples_per_row:.1f} samples per row)"
    return Cause(name="tiny-rows", text=text, next_action=_pack(signals, recipe), seconds=cost, alone=True)


def _lonely(signals: Signals) -> bool:
    return signals.samples_per_row is not None and signals.samples_per_row <= LONELY_SAMPLES_PER_ROW


def _recompute(signals: Signals, recipe: Recipe | None) -> Cause | None:
    on = recipe is None or recipe.train.gradient_checkpointing
    ratio = signals.fwd_bwd_over_fwd
    if not on or ratio is None or ratio < RECOMPUTED_FORWARD:
        return None
    return Cause(
        name="recompute",
        text=f"the forward pass is computed twice (forward+backward / forward = {ratio:.1f})",
        next_action="Set train.gradient_checkpointing=false if the activations of a row fit into memory.",
        seconds=None if signals.fwd_bwd_s is None else signals.fwd_bwd_s / ratio,
        alone=True,
    )


def _other(signals: Signals, recipe: Recipe | None) -> Cause | None:
    shares = signals.shares
    if not shares or shares["other"] <= shares["forward_backward"]:
        return None
    return Cause(
        name="other",
        text=f"time outside the phases that TRL measures ({percent(shares['other'])} of the step)",
        next_action="Raise train.save_steps if checkpoints are slow; otherwise profile the trainer (collation, "
        "logging).",
        seconds=None if signals.step_s is None else shares["other"] * signals.step_s,
        alone=True,
    )


def _compute(signals: Signals, explained_s: float) -> Cause:
    compute = "the trainer's own compute"
    if signals.mfu_fwd_bwd is not None:
        compute = f"compute at {signals.mfu_fwd_bwd:.3g} % MFU"
    action = "No setting makes the computation cheaper: add devices (train.processes), or accept this speed."
    seconds = None if signals.fwd_bwd_s is None else max(0.0, signals.fwd_bwd_s - explained_s)
    return Cause(name="compute", text=compute, next_action=action, seconds=seconds)


def _pack(signals: Signals, recipe: Recipe | None) -> str:
    if recipe is None:
        return "Pack samples into rows: set train.token_budget, and lower train.gradient_accumulation_steps with it."
    now = situation(recipe, signals)
    rows = None if now is None else longer_rows(now)
    if rows is None:
        return "Make rows longer still (train.token_budget) where the trainer's memory has room for them."
    return f"Pack samples into rows: {', and '.join(rows)}."
