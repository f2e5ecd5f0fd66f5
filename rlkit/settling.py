"""How many steps a verdict needs: those in which a run settles, and some that can be read."""

from __future__ import annotations

from rlkit.recipe import Recipe

# The pipeline starts empty: until the queue, which is made to hold max_staleness steps' worth of samples, has been
# filled and emptied once, waits and readings are those of a cold start. Step 1 comes on top: it has no perf/step_s, and
# holds the first sync and every first-use cost.
DEFAULT_STALENESS = 4  # TRL's default max_staleness, for a run whose recipe is not known
MAX_WARMUP_STEPS = 10  # a long warm-up would leave nothing of a short run; by then a queue of any size reads steadily

# Fewer settled steps say nothing: steps of one run differ by a factor of two.
MIN_STEPS = 3


def warmup_steps(recipe: Recipe | None) -> int:
    """How many steps from the start of a trainer are set aside."""
    staleness = DEFAULT_STALENESS if recipe is None else recipe.rollout.max_staleness
    return min(1 + staleness, MAX_WARMUP_STEPS)


def steps_for_a_verdict(recipe: Recipe | None) -> int:
    """The fewest steps of a run, never resumed, that a verdict can be made of."""
    return warmup_steps(recipe) + MIN_STEPS
