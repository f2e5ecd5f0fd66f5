"""What a replica's time goes into while it decodes, as far as the machine and the model are known.

An iteration takes a fixed time (reading the weights, launching kernels) and a time for each sequence in it. More
rollouts in flight make use of the first, more replicas lessen the second. The constants are the simulator's
(rlkit.simulation.constants), for hardware and models that it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe
from rlkit.signals import Signals
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.setup import Setup


@dataclass(frozen=True)
class Decoding:
    """Of one engine: seconds of an iteration whatever the number of sequences in it, and tokens of cache."""

    fixed_s: float
    capacity_tokens: float
    engines: int


@dataclass(frozen=True)
class Rows:
    """Of the trainer: seconds of a row whatever its length, and seconds a token of it adds, checkpointing on."""

    row_s: float
    token_s: float


def decoding(recipe: Recipe) -> Decoding | None:
    """Of the recipe's replicas; None when nothing is known of their hardware or model."""
    setup = _setup(recipe)
    if setup is None:
        return None
    engine = setup.engines[0]
    return Decoding(engine.rates.base_s, engine.capacity.kv_tokens, len(setup.engines))


def rows(recipe: Recipe) -> Rows | None:
    """Of the recipe's trainer; None when nothing is known of its hardware or model."""
    setup = _setup(recipe)
    if setup is None or not setup.trainer.row_token_s:
        return None
    return Rows(setup.trainer.row_s, setup.trainer.row_token_s)


def fixed_share(signals: Signals, recipe: Recipe) -> float | None:
    """The part of decoding that is the same with one sequence as with all of them; None when it cannot be told.

    A rollout's time without the syncs that stop it, divided among its tokens, is one iteration.
    """
    known = decoding(recipe)
    if known is None or not signals.completion_token_s:
        return None
    running = 1.0 - min(signals.sync_share or 0.0, 0.9)
    return min(1.0, known.fixed_s / (signals.completion_token_s * running))


def _setup(recipe: Recipe) -> Setup | None:
    # The toy models' hardware is this machine: nothing about it is a constant.
    if recipe.hardware.replica == "cpu" or recipe.hardware.trainer == "cpu":
        return None
    try:
        return setup_of(recipe)
    except RlkitError:
        return None
