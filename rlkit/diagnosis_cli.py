"""`rlkit evaluate-diagnosis`: how often the verdict is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlkit import terminal


def evaluate_diagnosis(
    scenarios: Annotated[int, typer.Option(min=2, help="Recipes drawn; half of them for tuning.")] = 240,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    seed: Annotated[int, typer.Option(help="What the recipes are drawn with.")] = 0,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time, else one for each core.")] = None,
    store: Annotated[Path | None, typer.Option(help="Where labelled runs are kept, else in rlkit's cache.")] = None,
    stored: Annotated[bool, typer.Option("--stored", help="Simulate nothing: judge what is there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how often the diagnosis is right, against what interventions on simulated runs show.

    Goes on where it was interrupted.
    """
    from rich.progress import Progress

    from rlkit import machine
    from rlkit.errors import BadInput
    from rlkit.evaluation.evaluate import HALVES, evaluate, judge_stored, score
    from rlkit.evaluation.scenarios import scenarios as draw
    from rlkit.evaluation.store import LabelStore

    drawn, labels = draw(scenarios, seed), LabelStore(store or machine.cache_folder() / "labelled-runs")
    if stored:
        judged = judge_stored(drawn, labels, seeds)
        if not judged:
            raise BadInput("--stored: no run of these scenarios is there yet; leave it out to simulate them")
    else:
        with Progress(console=terminal.err, transient=True) as progress:
            task = progress.add_task("labelled runs")
            judged = evaluate(
                drawn,
                labels,
                seeds,
                processes,
                lambda done, whole: progress.update(task, completed=done, total=whole),
            )
    halves = {half: score([run for run in judged if run.half == half]) for half in HALVES}
    if as_json:
        terminal.print_json({half: one.to_dict() for half, one in halves.items()})
        return
    for half, one in halves.items():
        terminal.print_score(half, one)
