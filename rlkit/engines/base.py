"""What an engine is: it executes a recipe's jobs, tells what happens, and leaves a trackio run behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rlkit.run_folder import RunFolder


@dataclass(frozen=True)
class Event:
    """What happened: a phase began (`text`), a step was logged (`step` of `total`, `metrics`), or a log line."""

    kind: Literal["phase", "step", "log"]
    text: str = ""
    step: int = 0
    total: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the folder, the last step that was logged, and what the jobs took."""

    folder: RunFolder
    steps: int
    seconds: float
    peak_memory_gib: float | None = None


OnEvent = Callable[[Event], None]
# Asked with a price before hardware is rented; False starts nothing.
Confirm = Callable[[object], bool]


def agree(price: object) -> bool:
    """To every price."""
    return True
