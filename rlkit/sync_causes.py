"""The weight sync as a cause."""

from __future__ import annotations

from rlkit.cause import Cause
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.sizing import rarer_sync, shorter_retry
from rlkit.wording import percent

# From here on a sync is worth naming beside the cause. Published: a quarter of the wall-clock was, 8 % was not.
LARGE_SYNC = 0.2


def sync_cause(signals: Signals, recipe: Recipe | None) -> Cause:
    """A sync that takes a large part of the step, and what shortens it."""
    action = shorten_sync(signals, recipe)
    return Cause(
        name="sync",
        text=f"the weight sync ({sync_share_words(signals)})",
        next_action=f"{action[0].upper()}{action[1:]}.",
        seconds=signals.weight_sync_per_step_s,
    )


def shorten_sync(signals: Signals, recipe: Recipe | None) -> str:
    """What to do about a sync that takes too long, as a part of a sentence."""
    if recipe is None:
        return "raise rollout.weight_sync_steps (samples get staler)"
    every = f"from {recipe.rollout.weight_sync_steps} to {rarer_sync(recipe)}"
    rarer = f"raise rollout.weight_sync_steps {every} (samples get staler)"
    retry_s = shorter_retry(recipe)
    if retry_s is None:
        return rarer
    # A sync that had to ask a replica again took at least one pause between attempts.
    loading = signals.weight_sync_s if signals.weight_sync_load_s is None else signals.weight_sync_load_s
    if loading is None or loading < recipe.transport.retry_s:
        return rarer
    return f"lower transport.retry_s from {recipe.transport.retry_s:g} to {retry_s:g} or {rarer}"


def sync_is_large(signals: Signals) -> bool:
    """Whether the weight sync takes a part of the step that is worth naming."""
    return signals.sync_share is not None and signals.sync_share >= LARGE_SYNC


def sync_share_words(signals: Signals) -> str:
    """`24 % of the step`."""
    bound = "up to " if signals.step_s is None else ""
    return f"{bound}{percent(signals.sync_share or 0.0)} of the step"
