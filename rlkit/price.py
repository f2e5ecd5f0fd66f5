"""What a run costs: hours times the price of all its Jobs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlkit.recipe import Recipe


def usd_per_hour(recipe: Recipe, changed: Recipe) -> float | None:
    """What an hour of the changed recipe costs, at the price per GPU of the first; None when that is not known.

    A changed recipe that says another price than the first costs what it says.
    """
    rate = recipe.hardware.usd_per_hour
    if changed.hardware.usd_per_hour != rate:
        return changed.hardware.usd_per_hour
    return None if rate is None else rate / _gpus(recipe) * _gpus(changed)


def usd_of(recipe: Recipe, minutes: float | None) -> float | None:
    """USD of so many minutes at the recipe's price; None without one, or where nobody knows how long it took."""
    rate = recipe.hardware.usd_per_hour
    return None if rate is None or minutes is None else rate * minutes / 60


def usd_paid(state: Mapping[str, Any]) -> float | None:
    """USD that a run on rented hardware was billed, the start and the end of its Jobs included; None: it was not.

    `state` is the run's state.json.
    """
    paid = state.get("usd")
    return None if paid is None else float(paid)


def _gpus(recipe: Recipe) -> int:
    def of(flavor: str) -> int:
        match = re.search(r"x(\d+)$", flavor)
        return int(match.group(1)) if match else 1

    return of(recipe.hardware.trainer) + recipe.serve.replicas * of(recipe.hardware.replica)
