"""Why a run is bound where it is, ranked by the time each cause costs, and which field of the recipe to change.

The causes of the side that bounds the run come first, those of other sides that are worth naming after them. Signals
and recipe in, words out.
"""

from __future__ import annotations

from dataclasses import replace

from rlkit.cause import Cause
from rlkit.generation_causes import generation_causes, scoring_cause
from rlkit.judgement import Bound
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.sync_causes import shorten_sync, sync_cause, sync_is_large, sync_share_words
from rlkit.trainer_causes import trainer_causes
from rlkit.waste_causes import waste_causes

__all__ = ["Cause", "causes_of", "first_cause", "shorten_sync", "sync_is_large"]


def causes_of(bound: Bound, signals: Signals, recipe: Recipe | None) -> list[Cause]:
    """The causes, the most telling first; none for a side that nobody can tell."""
    if bound in ("undetermined", "stalled"):
        return waste_causes(signals, recipe)
    found: list[Cause] = []
    if bound == "trainer":
        found = trainer_causes(signals, recipe)
    elif bound == "generation":
        found = generation_causes(signals, recipe)
    elif bound == "scoring":
        found = [scoring_cause(signals, recipe)]
    elif bound == "sync":
        found = [sync_cause(signals, recipe)]
    others = [] if bound == "sync" or not sync_is_large(signals) else [sync_cause(signals, recipe)]
    others += [cause for cause in waste_causes(signals, recipe) if cause.name not in {one.name for one in found}]
    return found + sorted(others, key=lambda cause: -(cause.seconds or 0.0))


def first_cause(bound: Bound, signals: Signals, recipe: Recipe | None) -> Cause:
    """The first of the causes of a bounded run; a large weight sync beside it is named in the same breath."""
    found = causes_of(bound, signals, recipe)
    first = found[0]
    if first.alone or not any(cause.name == "sync" for cause in found[1:]):
        return first
    pausing = ", which pauses them," if bound == "generation" else ""
    text = f"{first.text}, and the weight sync{pausing} takes {sync_share_words(signals)}"
    action = first.next_action.removesuffix(".").removesuffix(first.alternative)
    return replace(first, text=text, next_action=f"{action}; to shorten the sync, {shorten_sync(signals, recipe)}.")
