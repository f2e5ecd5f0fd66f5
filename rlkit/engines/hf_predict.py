"""How long a recipe's steps will take, by the simulator: what the price of a run is reckoned with."""

from __future__ import annotations

from dataclasses import replace

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate

# Enough to be past the start, when the queue is empty, and several weight syncs; a second or two to simulate.
PREDICTED_STEPS = 40


def predicted_step_s(recipe: Recipe) -> float | None:
    """Mean seconds a step, or None for a model or hardware that nothing is known of."""
    try:
        setup = setup_of(recipe)
        steps = min(setup.steps, PREDICTED_STEPS)
        return simulate(replace(setup, steps=steps)).seconds / steps
    except RlkitError:
        return None
