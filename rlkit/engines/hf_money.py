"""What the Jobs of a run cost: prices from the Hub's own list, hours from its own clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import JobHardwareInfo, JobInfo

from rlkit.engines.hf_watch import phase_of
from rlkit.errors import BadInput
from rlkit.price import usd_paid
from rlkit.recipe import Recipe

# How many of a list's units are in an hour; the Hub says "minute" today.
_UNITS_PER_HOUR = {"second": 3600.0, "minute": 60.0, "hour": 1.0}


def hourly_prices(hardware: Iterable[JobHardwareInfo]) -> dict[str, float]:
    """US dollars an hour by flavor. Raises BadInput for a price in a unit that is not known."""
    prices = {}
    for item in hardware:
        unit = item.unit_label.lower().rstrip("s")
        if unit not in _UNITS_PER_HOUR:
            raise BadInput(f"hardware: the Hub prices {item.name} by the {item.unit_label!r}, which is not known here")
        prices[item.name] = item.unit_cost_usd * _UNITS_PER_HOUR[unit]
    return prices


@dataclass(frozen=True)
class Price:
    """What a recipe's set-up costs: dollars an hour for all Jobs, and hours when its steps' time is known."""

    usd_per_hour: float
    hours: float | None
    deadline_hours: float
    budget_usd: float | None

    @property
    def usd(self) -> float | None:
        """Of the whole run, as predicted."""
        return None if self.hours is None else self.usd_per_hour * self.hours

    @property
    def most_usd(self) -> float:
        """What it can cost at most: the Jobs' timeout or the budget ends it."""
        whole = self.usd_per_hour * self.deadline_hours
        return whole if self.budget_usd is None else min(whole, self.budget_usd)

    def __str__(self) -> str:
        text = f"${self.usd_per_hour:.2f} an hour"
        if self.usd is not None and self.hours is not None:
            # A run of a chase is a few minutes.
            hours = f"{self.hours:.1f} h" if self.hours >= 1 else f"{60 * self.hours:.0f} min"
            text += f", about ${self.usd:.2f} for the run ({hours} predicted)"
        return f"{text}, at most ${self.most_usd:.2f}"


def price_of(recipe: Recipe, prices: Mapping[str, float], step_s: float | None) -> Price:
    """The price of a recipe on these flavors; `step_s` is the predicted mean step. Raises BadInput: unknown flavor."""
    hardware = recipe.hardware
    for name in ("trainer", "replica"):
        flavor = getattr(hardware, name)
        if flavor not in prices:
            known = ", ".join(sorted(prices))
            raise BadInput(f"hardware.{name}: {flavor!r} is no flavor of Hugging Face Jobs; there are {known}")
    hourly = prices[hardware.trainer] + recipe.serve.replicas * prices[hardware.replica]
    hours = None if step_s is None else recipe.train.steps * step_s / 3600
    return Price(hourly, hours, hardware.deadline_hours, hardware.budget_usd)


def job_cost(job: JobInfo, prices: Mapping[str, float]) -> float | None:
    """Dollars one Job has cost so far, by the seconds it ran; None for a flavor without a price."""
    flavor = str(getattr(job.flavor, "value", job.flavor))
    if flavor not in prices:
        return None
    seconds = job.durations.running_secs if job.durations else None
    return prices[flavor] * (seconds or 0) / 3600


def spent(jobs: Iterable[JobInfo], prices: Mapping[str, float]) -> float:
    """Dollars all these Jobs have cost so far."""
    return sum(job_cost(job, prices) or 0.0 for job in jobs)


def spent_before(state: Mapping[str, Any], jobs: Iterable[JobInfo], prices: Mapping[str, float]) -> float:
    """Dollars that a run's earlier starts cost: as noted when they ended, else of Jobs that ended without their kernel.

    `state` is the run's state.json, `jobs` are all of the run; one that goes on is the next kernel's to count.
    """
    noted = usd_paid(state) or 0.0
    if state.get("status") != "running":
        return noted
    launched = [job for job in jobs if (job.labels or {}).get("launch") == state.get("launch")]
    return noted + spent((job for job in launched if phase_of(job.status.stage) == "ended"), prices)


def stop_reason(recipe: Recipe, spent_usd: float, hours: float) -> str | None:
    """Why a run must end now for its money or its time, or None."""
    hardware = recipe.hardware
    if hardware.budget_usd is not None and spent_usd >= hardware.budget_usd:
        return f"hardware.budget_usd: ${spent_usd:.2f} of ${hardware.budget_usd:.2f} are spent"
    if hours >= hardware.deadline_hours:
        return f"hardware.deadline_hours: {hours:.1f} of {hardware.deadline_hours:g} hours are over"
    return None
