"""`rlkit diagnose`, `rlkit report`, `rlkit runs`: what runs that were logged tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlkit import terminal
from rlkit.errors import BadInput
from rlkit.run_folder import RUNS
from rlkit.run_name import RUN_OR_PROJECT, find_folder, named, no_run

if TYPE_CHECKING:
    from rlkit.recipe import Recipe

Source = Annotated[str | None, typer.Option(help="A trackio server's URL or a Space, else this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(diagnose)
    app.command()(report)
    app.command()(runs)


def diagnose(
    project: Annotated[str, typer.Argument(metavar="RUN", help=RUN_OR_PROJECT)],
    name: Annotated[str | None, typer.Option("--run", help="The run's name, else the newest.")] = None,
    source: Source = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Also where every second of it went.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what bounded a run, and why."""
    from dataclasses import asdict

    from rlkit.diagnosis import diagnose as diagnose_frame
    from rlkit.ledger import waste_ledger
    from rlkit.results import read_run
    from rlkit.tracking import load_run

    recipe: Recipe | None
    meant = named(project, name, source)
    if meant.folder is not None:
        logged, recipe = read_run(meant.folder)
    else:
        logged = load_run(meant.project, meant.run or None, source=source)
        recipe = logged.recipe
    terminal.tell(meant.note(logged.name))
    verdict = diagnose_frame(logged.frame, recipe)
    if ledger and recipe is None:
        raise BadInput(f"{project}: --ledger needs the run's recipe, and it was logged without one")
    entries = waste_ledger(logged.frame, recipe) if ledger and recipe is not None else []
    if as_json:
        about: dict[str, Any] = {"project": logged.project, "run": logged.name}
        about |= {"ledger": [asdict(entry) for entry in entries]} if ledger else {}
        terminal.print_json(about | {"verdict": verdict.model_dump(mode="json")})
    else:
        terminal.print_verdict(verdict, evidence=True)
        if ledger:
            terminal.print_ledger(entries)


def report(
    subject: Annotated[
        str, typer.Argument(metavar="NOTEBOOK|RUN", help="A notebook, a run's folder, or its name under runs/out.")
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="A notebook's parameter; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what a run's report says as JSON.")] = False,
) -> None:
    """Render a notebook, or a run's report, as one HTML file that opens offline; a run's has a JSON file beside it."""
    from rlkit.report import render_notebook, report_run, twin

    if subject.endswith(".ipynb"):
        if as_json:
            raise BadInput("--json: only a run's report is printed as JSON, give its folder")
        notebook = Path(subject)
        values = dict(_parameter(text) for text in parameters or [])
        written = render_notebook(notebook, values, out or RUNS / f"{notebook.stem}.html")
    elif parameters:
        raise BadInput(f"-p {parameters[0]}: only a notebook takes parameters, {subject!r} is not one (*.ipynb)")
    else:
        folder = find_folder(subject)
        if folder is None:
            ways = f"give a run's folder, the name of a run under {RUNS}, or a notebook (*.ipynb)"
            raise BadInput(f"{subject}: {no_run(subject)}; {ways}")
        written = report_run(folder, out)
        if as_json:
            print(twin(written).read_text(encoding="utf-8"), end="")
            return
    terminal.say(str(written))


def runs(
    project: Annotated[str, typer.Argument(help="A trackio project.")], source: Source = None, as_json: AsJson = False
) -> None:
    """List the runs of a trackio project, oldest first."""
    import pandas as pd
    from rich.table import Table

    from rlkit.tracking import list_runs

    frame = list_runs(project, source)
    if as_json:
        print(frame.to_json(orient="records", date_format="iso", indent=2))
        return
    table = Table("run", "steps", "started (UTC)", "last update (UTC)", box=None)
    for row in frame.to_dict("records"):
        moments = [row[column] for column in ("created", "last_update")]
        times = ["unknown" if pd.isna(moment) else f"{moment:%Y-%m-%d %H:%M}" for moment in moments]
        table.add_row(str(row["name"]), str(row["steps"]), *times)
    terminal.print_table(table)


def _parameter(text: str) -> tuple[str, Any]:
    from rlkit.recipe_layers import parse_yaml

    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise BadInput(f"-p {text}: expected name=value")
    try:
        return name, parse_yaml(value) if value else ""
    except BadInput:
        raise BadInput(f"-p {text}: {value!r} is not a YAML value") from None
