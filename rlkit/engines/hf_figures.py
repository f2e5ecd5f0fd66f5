"""Figures from the two Jobs of `rlkit check --measure`, and what they say of a recipe's transport. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlkit.engines.hf_probe import EARLY, LATE, MARK, RENAMED
from rlkit.preflight import Finding
from rlkit.recipe import Recipe

# A load is asked again this many times over the delay: less only adds requests, more adds seconds to every sync.
RETRIES_PER_DELAY = 6
# The slowest delay that was seen is one look at one bucket; a sync must survive a few times that.
DEADLINE_MARGIN = 4.0


@dataclass(frozen=True)
class Figures:
    """What was measured; None where it was not seen. Seconds from the writer's close to the reader's whole file."""

    early_s: float | None  # a file that was looked for before it was there
    late_s: float | None  # one that was not
    hashes_match: bool | None
    renamed_s: float | None
    rename_is_whole: bool | None  # no look saw a part of the renamed folder
    status_without_token: int | None
    token_reaches_the_job: bool | None
    held_s: float | None  # the longest response that came through

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON types."""
        return asdict(self)

    @property
    def slowest_s(self) -> float | None:
        """The longest a file took to show."""
        seen = [value for value in (self.early_s, self.late_s, self.renamed_s) if value is not None]
        return max(seen) if seen else None


def figures_from(
    written: Iterable[str],
    looked: Iterable[str],
    status_without_token: int | None,
    token_reaches_the_job: bool | None,
    held_s: float | None,
) -> Figures:
    """Figures from both Jobs' log lines and what the exposed port answered."""
    wrote = {item["name"]: item for item in _events(written, "written")}
    saw = {item["name"]: item for item in _events(looked, "seen")}

    def delay(name: str) -> float | None:
        if name not in wrote or name not in saw:
            return None
        # The clocks of two machines: a small negative value is their difference.
        return max(round(float(saw[name]["at"]) - float(wrote[name]["at"]), 2), 0.0)

    both = [name for name in (EARLY, LATE) if name in wrote and name in saw]
    return Figures(
        early_s=delay(EARLY),
        late_s=delay(LATE),
        hashes_match=all(wrote[name]["sha256"] == saw[name]["sha256"] for name in both) if both else None,
        renamed_s=delay(RENAMED),
        rename_is_whole=saw[RENAMED]["partial_looks"] == 0 if RENAMED in saw else None,
        status_without_token=status_without_token,
        token_reaches_the_job=token_reaches_the_job,
        held_s=held_s,
    )


def transport_findings(recipe: Recipe, figures: Figures) -> list[Finding]:
    """What the figures say against the recipe."""
    found = []
    if recipe.transport.kind == "bucket":
        slowest = figures.slowest_s
        if None in (figures.early_s, figures.late_s, figures.renamed_s) or slowest is None:
            message = "a file did not show in the other Job's mount in time"
            return [Finding("error", "transport.kind", message, "set transport.kind to push, or measure again")]
        if figures.hashes_match is False:
            message = "a file arrived with other bytes than were written"
            found.append(Finding("error", "transport.kind", message, "set transport.kind to push"))
        if recipe.transport.deadline_s < DEADLINE_MARGIN * slowest:
            message = f"{recipe.transport.deadline_s:g} s, and the mount took {slowest:.1f} s to show a file"
            fix = f"set it to {DEADLINE_MARGIN * slowest:.0f}, or transport.kind to push"
            found.append(Finding("error", "transport.deadline_s", message, fix))
        retry = retry_for(slowest)
        if recipe.transport.retry_s > 2 * retry:
            message = f"{recipe.transport.retry_s:g} s, and the mount took {slowest:.1f} s: up to that is lost a sync"
            found.append(Finding("warning", "transport.retry_s", message, f"set it to {retry:g}"))
    elif figures.token_reaches_the_job is False:
        message = "the Jobs proxy keeps the token, so a receiver beside a replica would refuse every adapter"
        found.append(Finding("error", "transport.kind", message, "set transport.kind to bucket"))
    if figures.held_s is not None and figures.held_s < recipe.rollout.request_timeout:
        message = f"{recipe.rollout.request_timeout} s, and the Jobs proxy held a response for {figures.held_s:g} s"
        fix = "shorten the completions so that one takes less"
        found.append(Finding("warning", "rollout.request_timeout", message, fix))
    return found


def measured_transport(recipe: Recipe, figures: Figures) -> dict[str, float]:
    """The transport's fields that the figures set, in seconds: how often a load is asked again, and for how long.

    Only through the bucket, and a deadline only where the recipe's is too short.
    """
    slowest = figures.slowest_s
    if recipe.transport.kind != "bucket" or slowest is None:
        return {}
    changes = {"transport.retry_s": retry_for(slowest)}
    if recipe.transport.deadline_s < DEADLINE_MARGIN * slowest:
        changes["transport.deadline_s"] = float(math.ceil(DEADLINE_MARGIN * slowest))
    current = recipe.transport.model_dump()
    return {field: value for field, value in changes.items() if current[field.partition(".")[2]] != value}


def retry_for(slowest_s: float) -> float:
    """Seconds between two asks for an adapter on a mount that takes so long to show a file."""
    return max(round(slowest_s / RETRIES_PER_DELAY, 1), 0.1)


def _events(lines: Iterable[str], event: str) -> list[dict[str, Any]]:
    said = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return [item for item in said if item.get("event") == event]
