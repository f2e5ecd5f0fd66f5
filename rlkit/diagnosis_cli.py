"""`rlkit watch`: a run that goes on. `rlkit evaluate-diagnosis`: how often the verdict is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit import terminal
from rlkit.run_name import RUN_OR_PROJECT, Named, named

if TYPE_CHECKING:
    from rlkit.tracking import Run


def watch(
    project: Annotated[str, typer.Argument(metavar="RUN", help=RUN_OR_PROJECT)],
    name: Annotated[str | None, typer.Option("--run", help="The run's name, else the newest.")] = None,
    source: Annotated[str | None, typer.Option(help="A folder, a server's URL or a Space, else trackio's own.")] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 30.0,
    until_clear: Annotated[
        bool, typer.Option("--until-clear", help="End once the verdict is sure and steady.")
    ] = False,
    alerts: Annotated[bool, typer.Option(help="Also as trackio's alerts of the run: changes and stalls.")] = True,
) -> None:
    """Follow a run until it is over: its verdict, and each change of it; a stall is an error."""
    import sqlite3
    import time
    from datetime import UTC, datetime

    from rlkit.alerts import raise_alert
    from rlkit.diagnosis import diagnose
    from rlkit.engines.state import has_ended, state_in_words
    from rlkit.errors import RlkitError
    from rlkit.watch import Watch

    meant = named(project, name, source)
    read, place = _reader(meant, source)
    followed, colours = Watch(until_clear), {"info": "green", "warn": "yellow", "error": "red"}
    newest = ""
    while True:
        logged = read()
        if newest != logged.name:  # the newest run of a project is another one once the next has begun
            newest = logged.name
            terminal.tell(meant.note(newest))
        step = int(logged.frame.index.max())
        if logged.recipe is not None and step >= logged.recipe.train.steps:
            verdict = diagnose(logged.frame, logged.recipe)
            terminal.labelled(f"step {step}:", "green", f"The run is over. {verdict.headline}")
            return
        if meant.folder is not None and has_ended(meant.folder):
            verdict, how = diagnose(logged.frame, logged.recipe), state_in_words(meant.folder)
            terminal.labelled(f"step {step}:", "yellow", f"The run does not go on: {how}. {verdict.headline}")
            return
        news = followed.look(diagnose(logged.frame, logged.recipe, now=datetime.now(UTC)))
        if news is not None:
            terminal.labelled(f"step {step}:", colours[news.level], news.text)
            if alerts and news.level != "info":
                try:
                    raise_alert(logged, news.title, news.text, news.level, place)
                except (RlkitError, OSError, sqlite3.Error) as problem:  # the watch is worth more than its alerts
                    terminal.say(f"no alerts: {problem}", terminal.err, "yellow")
                    alerts = False
            if news.stop:
                return
        time.sleep(every)


def _reader(meant: Named, source: str | None) -> tuple[Callable[[], Run], Path | str | None]:
    """What reads a run as it is now, and where its alerts go."""
    from rlkit.recipe import load_recipe
    from rlkit.results import read_run, trackio_source
    from rlkit.tracking import load_run

    folder = meant.folder
    if folder is None:
        return lambda: load_run(meant.project, meant.run or None, source=source), source
    return lambda: read_run(folder)[0], trackio_source(load_recipe(folder.recipe), folder)


def evaluate_diagnosis(
    scenarios: Annotated[int, typer.Option(min=2, help="Recipes drawn; half of them for tuning.")] = 240,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    seed: Annotated[
        list[int] | None, typer.Option(help="What the recipes are drawn with; repeatable: as many of each.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time, else one for each core.")] = None,
    store: Annotated[Path | None, typer.Option(help="Where labelled runs are kept, else in rlkit's cache.")] = None,
    stored: Annotated[bool, typer.Option("--stored", help="Simulate nothing: judge what is there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how often the diagnosis is right, against what interventions on simulated runs show.

    Goes on where it was interrupted. The seeds 61, 62 and 63 had no part in tuning, neither half of them.
    """
    from rlkit import machine
    from rlkit.errors import BadInput
    from rlkit.evaluation.evaluate import HALVES, evaluate, judge_stored, score
    from rlkit.evaluation.scenarios import scenarios as draw
    from rlkit.evaluation.store import LabelStore

    drawn = [scenario for one in seed or [0] for scenario in draw(scenarios, one)]
    labels = LabelStore(store or machine.cache_folder() / "labelled-runs")
    if stored:
        judged = judge_stored(drawn, labels, seeds)
        if not judged:
            raise BadInput("--stored: no run of these scenarios is there yet; leave it out to simulate them")
    else:
        with terminal.working("labelling runs") as told:
            judged = evaluate(drawn, labels, seeds, processes, told)
    scores = {half: score([run for run in judged if run.half == half]) for half in HALVES} | {"all": score(judged)}
    if as_json:
        terminal.print_json({name: one.to_dict() for name, one in scores.items()})
        return
    for name, one in scores.items():
        terminal.print_score(name, one)
