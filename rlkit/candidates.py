"""Which changes of a recipe are worth simulating after its run: those its bound does not make vain, and that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlkit.counsel import Objective, Refused
from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.remedies import Change, changed, remedies, together
from rlkit.simulation.planning import NEVER_WAITS
from rlkit.simulation.training_memory import MemoryEstimate, training_memory
from rlkit.sizing import Situation

# A trainer that waits for longer than this gains nothing from computing faster.
STARVED = 0.25

# Of each side, the changes that are also tried together when none alone is worthwhile.
PAIRED = 2

Candidate = tuple[Change, Recipe, MemoryEstimate | None]  # the estimate where the change needs more, or less


def candidates(
    now: Situation, wait: float | None, learning: bool, objective: Objective, refused: list[Refused]
) -> Iterator[Candidate]:
    """The changes that could bring something, with their recipes; those that do not fit are told to `refused`."""
    seen: set[tuple[str, ...]] = set()
    for change in remedies(now, learning, objective == "cost"):
        # On shared cores each side has what the other one leaves, and either may gain by either's.
        if change.overrides in seen or (not now.shares_cores and _is_vain(change, wait)):
            continue
        seen.add(change.overrides)
        tried = _tried(now.recipe, change, refused)
        if tried is not None:
            yield tried


def _tried(recipe: Recipe, change: Change, refused: list[Refused]) -> Candidate | None:
    try:
        new = changed(recipe, change)
    except BadInput as error:
        refused.append(Refused(change.overrides, str(error)))
        return None
    memory = training_memory(new)
    before = training_memory(recipe)
    # A recipe that runs fits, whatever the estimate says.
    if memory is not None and before is not None and not memory.fits and memory.needed > before.needed:
        refused.append(Refused(change.overrides, f"memory: {memory}"))
        return None
    return change, new, None if before is not None and memory == before else memory


def _is_vain(change: Change, wait: float | None) -> bool:
    """Whether the other side's speed alone decides: the trainer's when it never waits, generation's when it starves."""
    if wait is None or change.side == "sync":
        return False
    if change.side == "generation":
        return wait < NEVER_WAITS
    if change.side == "trainer":
        return wait > STARVED
    return (wait > STARVED) == ("idle-replicas" in change.causes)


def pairs(
    gains: Mapping[tuple[str, ...], float], alone: Sequence[Candidate], recipe: Recipe, refused: list[Refused]
) -> Iterator[Candidate]:
    """A faster trainer and faster generation at once: between equals neither alone brings anything.

    `gains` are those of the changes that were simulated `alone`, by their overrides.
    """
    sides: dict[str, list[Change]] = {"trainer": [], "generation": []}
    for change, _, _ in alone:
        if change.side in sides:
            sides[change.side].append(change)
    best = {
        side: sorted(changes, key=lambda change: -gains.get(change.overrides, 0.0))[:PAIRED]
        for side, changes in sides.items()
    }
    for first in best["trainer"]:
        for second in best["generation"]:
            tried = _tried(recipe, together(first, second), refused)
            if tried is not None:
                yield tried
