"""Several runs on rented hardware within one total: who may start, and what is left. Pure.

Runs that nobody is asked about one by one need a total, and each a budget (`unbounded`). A run is bounded by its own
`hardware.budget_usd`, which its engine keeps. It starts only when the total has all of that left, beside what the runs
that go on may still take; what it did not spend is free again when it ends. A run is looked at every few seconds, so it
may spend that much more than it was allowed: what counts is what it spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlkit.price import usd_paid
from rlkit.recipe import Recipe

# Sums of dollars that should be equal differ by less.
_ROUNDING_USD = 1e-9


@dataclass
class Purse:
    """The total and what it goes to; `limit` is what the total is called where it was set."""

    total_usd: float
    limit: str
    _set_aside: dict[str, float] = field(default_factory=dict)  # by the name of a run that goes on
    _spent: dict[str, float] = field(default_factory=dict)  # by every run so far, in all its starts

    @property
    def spent_usd(self) -> float:
        """By the runs that ended, and by earlier starts of those that go on."""
        return sum(self._spent.values())

    @property
    def free_usd(self) -> float:
        """Neither spent nor set aside."""
        return max(self.total_usd - self.spent_usd - sum(self._set_aside.values()), 0.0)

    @property
    def going(self) -> int:
        """Runs that started and have not ended."""
        return len(self._set_aside)

    def refusal(self, run: str, most_usd: float) -> str | None:
        """Why a run that may cost this much, all its starts together, may not start now. None: it may."""
        wanted = most_usd - self._spent.get(run, 0.0)
        if wanted <= 0:
            return f"hardware.budget_usd: all of ${most_usd:.2f} are spent by this run"
        if wanted <= self.free_usd + _ROUNDING_USD:
            return None
        return (
            f"{self.limit}: ${self.free_usd:.2f} of ${self.total_usd:.2f} is left and this run may take ${wanted:.2f}"
        )

    def start(self, run: str, most_usd: float) -> None:
        """Set aside what a run may take that `refusal` lets start."""
        self._set_aside[run] = most_usd - self._spent.get(run, 0.0)

    def ended(self, run: str, usd: float) -> None:
        """A run ended, having spent this much in all its starts; also one that ended before this purse was made."""
        self._set_aside.pop(run, None)
        self._spent[run] = usd


def unbounded(rented: Mapping[str, Recipe], together: str, total_usd: float | None, limit: str) -> str | None:
    """Why these runs may not start without somebody who agrees to each: nobody said what one, or all, may cost.

    `rented` are the recipes on rented hardware by what each is called, `together` is what all are called, and `limit`
    what the total is called where it is set. None: they may, or there is none.
    """
    if rented and total_usd is None:
        return f"{limit}: missing, and {together} are on rented hardware (engine hf)"
    name = next((name for name, recipe in rented.items() if recipe.hardware.budget_usd is None), None)
    return None if name is None else f"hardware.budget_usd: not set, and {name} runs on engine hf"


def billed(recipe: Recipe, state: Mapping[str, Any]) -> float:
    """What a run was billed, as its engine noted (`state.json`); all it was allowed where that is not known.

    Nothing for a run that is not on rented hardware.
    """
    if recipe.engine != "hf":
        return 0.0
    paid = usd_paid(state)
    return recipe.hardware.budget_usd or 0.0 if paid is None else paid
