"""A chase run by run, as a notebook shows it: the change, what the dashboard says, the verdict, what came next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from html import escape

import plotly.graph_objects as go
from IPython.display import HTML

from rlkit import chase_figures
from rlkit import display as show
from rlkit.chart import Axis
from rlkit.past_run import PastRun
from rlkit.recipe_changes import changes_table
from rlkit.scoreboard import change_text, changes
from rlkit.scoreboard_text import NOTHING_PUBLISHED, Published
from rlkit.wording import number

# A cause that costs less of a step is named without it.
SOME_SECONDS = 0.005


def chapter(
    runs: Mapping[str, PastRun], name: str, published: Published = NOTHING_PUBLISHED, x: Axis = "step"
) -> Iterator[HTML | go.Figure]:
    """What there is to say of one run, in the order in which it is read."""
    order = list(runs)
    place, run = order.index(name), runs[name]
    yield show.html(f"<h2>Run {place + 1}: {escape(name)}</h2>")
    before = runs[order[place - 1]] if place else None
    yield show.note(_change(before, run))
    if before is not None and changes(before, run):
        yield show.table(changes_table(before.recipe if before else None, run.recipe))
    yield chase_figures.change(runs, name, x) if place else chase_figures.dashboard(runs, name, x)
    verdict = show.headline(run.verdict, _facts(run))
    yield show.html(f'<div class="rlkit-chapter">{verdict.data}</div>')
    yield show.note(_why(run))
    told = published.get(name, {})
    if told.get("verdict"):
        yield show.note(_published(told))
    following = runs[order[place + 1]] if place + 1 < len(order) else None
    if following is not None and not told.get("next") and changes(run, following):
        yield show.note(f"What was changed next: {change_text(run, following)}.")


def commands(runs: Mapping[str, PastRun]) -> dict[str, str]:
    """Shell commands that repeat each run, and the page of all of them."""
    found = {}
    for name, run in runs.items():
        again = next(iter(run.commands.items()), None)
        if run.folder is not None and again is not None:
            found[again[0]] = f"{name} again, in full"
    wanted = [run.where for run in runs.values()]
    return found | {shlex.join(["rlkit", "compare", *wanted, "--out", "page.html"]): "this page"}


def _change(before: PastRun | None, run: PastRun) -> str:
    if before is None:
        plan = run.recipe
        if plan is None:
            return "The first run; it recorded no recipe."
        replicas = f"{plan.serve.replicas} replica{'s' * (plan.serve.replicas > 1)}"
        return (
            f"Where it begins: {plan.model.name} on {replicas}, {plan.inflight_limit} rollouts in flight, a queue of"
            f" {plan.rollout.queue_maxsize}, {plan.train.steps} steps."
        )
    found = changes(before, run)
    if found is None:
        return "What changed is unknown: one of the two runs recorded no recipe."
    return (
        "The recipe, as what is different from the run before:" if found else "Nothing changed: the same recipe again."
    )


def _facts(run: PastRun) -> dict[str, object]:
    facts: dict[str, object] = {"steps": len(run.frame)}
    return facts if run.recipe is None else facts | {"engine": run.recipe.engine}


def _why(run: PastRun) -> str:
    """The cause, what else costs time, and what would make it another verdict."""
    verdict = run.verdict
    costs = [(cause.text, cause.seconds or 0.0) for cause in verdict.causes[1:]]
    others = [f"{words}, {number(cost)} s a step" if cost >= SOME_SECONDS else words for words, cost in costs]
    cause = f"The cause: {verdict.cause}." if verdict.cause else ""
    also = f"Also: {'; '.join(others)}." if others else ""
    return " ".join(part for part in (cause, also, verdict.would_change) if part)


def _published(told: Mapping[str, object]) -> str:
    after = f"; next: {told['next']}" if told.get("next") else "; there the chase ended"
    return f"Its authors said: {told['verdict']}, {told['cause']}{after}."
