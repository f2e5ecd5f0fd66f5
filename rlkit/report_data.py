"""What a run's report says, for machines: the JSON beside the HTML."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlkit.ledger import waste_ledger
from rlkit.past_run import PastRun
from rlkit.recipe_changes import run_changes


def report_data(past: PastRun) -> dict[str, Any]:
    """The report of a run as plain JSON types, in the order of the page; None and empty where the run left nothing.

    `verdict` has headline, evidence and signals; `ledger` device seconds and dollars; `recipe` is complete, `previous`
    names the run before it and what was changed since.
    """
    previous = None
    if past.previous is not None and past.recipe is not None:
        changes = run_changes(past.previous.recipe, past.recipe)
        fields = [{"field": field, "before": before, "now": now} for field, before, now in changes]
        previous = {"run": past.previous.name, "changes": fields}
    return {
        "run": past.name,
        "project": past.project,
        "facts": past.facts,
        "verdict": past.verdict.model_dump(mode="json"),
        "ledger": [asdict(entry) for entry in waste_ledger(past.frame, past.recipe)] if past.recipe else [],
        "evaluation": past.evaluation,
        "proxy": past.proxy,
        "recipe": None if past.recipe is None else past.recipe.to_dict(),
        "previous": previous,
        "versions": past.versions,
        "limits": past.limits,
        "commands": past.commands,
    }
