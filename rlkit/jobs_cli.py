"""`rlkit jobs`: what runs on Hugging Face Jobs, what it says, what it costs, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlkit import terminal
from rlkit.errors import BadInput
from rlkit.run_name import run_name

if TYPE_CHECKING:
    from rlkit.engines.hf_hub import Hub
    from rlkit.engines.hf_list import JobRow
    from rlkit.preflight import Finding
    from rlkit.recipe import Recipe

app = typer.Typer(help="Jobs on Hugging Face: list, logs, cancel.", no_args_is_help=True)

RunName = Annotated[str | None, typer.Argument(metavar="RUN", help="A run's name or folder, else all runs.")]
Namespace = Annotated[str | None, typer.Option(help="The user or organisation, else the token's own.")]
TAIL = 100  # a screen or two


@app.command("list")
def list_jobs(
    run: RunName = None,
    namespace: Namespace = None,
    alive: Annotated[bool, typer.Option("--alive", help="Only those that are not over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show Jobs with stage, minutes and cost so far."""
    from rich.table import Table

    from rlkit.engines.hf_list import total_usd

    rows = [row for row in _rows(_hub(namespace), run) if row.alive or not alive]
    if as_json:
        terminal.print_json({"jobs": [row.to_dict() for row in rows], "usd": round(total_usd(rows), 4)})
        return
    table = Table("run", "job", "stage", "flavor", "minutes", "cost", "id", box=None)
    for row in rows:
        cost = "unknown" if row.usd is None else f"${row.usd:.2f}"
        table.add_row(row.run, row.name, row.stage, row.flavor, f"{row.minutes:.0f}", cost, row.id)
    terminal.print_table(table)
    terminal.say(f"${total_usd(rows):.2f} so far, {sum(row.alive for row in rows)} not over")


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    job: Annotated[str, typer.Argument(help="trainer, replica-0, ... or a Job's id.")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the Job ends.")] = False,
    namespace: Namespace = None,
) -> None:
    """Print what a Job says: its last lines, or all from now on."""
    hub = _hub(namespace)
    found = [row for row in _rows(hub, run) if job in (row.name, row.id)]
    if not found:
        raise BadInput(f"{run}: it has no Job {job!r}; `rlkit jobs list {run}` shows them")
    newest = found[-1]
    for line in hub.follow(newest.id) if follow else hub.last_lines(newest.id, TAIL):
        print(line, flush=True)


@app.command()
def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")], namespace: Namespace = None
) -> None:
    """End every Job of a run."""
    hub = _hub(namespace)
    rows = _rows(hub, run)
    if not rows:
        raise BadInput(f"{run}: there are no Jobs of such a run; `rlkit jobs list` shows all")
    for row in rows:
        if row.alive:
            hub.cancel(row.id)
            terminal.say(f"cancelled {row.name} {row.id}")
    terminal.say(f"nothing of {run} is running")


def measure_transport(recipe: Recipe) -> tuple[dict[str, Any], list[Finding]]:
    """Run the two Jobs of `rlkit check --measure`, say their figures, and return them with what follows."""
    from rlkit.engines.hf_figures import transport_findings
    from rlkit.engines.hf_measure import measure
    from rlkit.engines.hf_measured import keep_figures

    if recipe.engine != "hf":
        raise BadInput(f"--measure: tries Hugging Face Jobs, and engine is {recipe.engine}; add --engine hf")
    hub = _hub(recipe.hardware.namespace)
    figures = measure(hub, recipe, lambda event: terminal.say(event.text, terminal.err))
    kept = keep_figures(figures, hub.namespace, recipe.hardware.bucket)
    for name, value in figures.to_dict().items():
        terminal.say(f"{name}: {value}", terminal.err)
    terminal.say(f"kept in {kept}: runs on this bucket take their transport's retry from it", terminal.err)
    return figures.to_dict(), transport_findings(recipe, figures)


def _hub(namespace: str | None) -> Hub:
    from rlkit.engines.hf_hub import Hub

    return Hub.connect(namespace)


def _rows(hub: Hub, run: str | None) -> list[JobRow]:
    from rlkit.engines.hf_jobs import TOOL_LABEL, label_value
    from rlkit.engines.hf_list import job_rows
    from rlkit.engines.hf_money import hourly_prices

    labels = TOOL_LABEL if run is None else {**TOOL_LABEL, "run": label_value(run_name(run))}
    return job_rows(hub.find(labels), hourly_prices(hub.prices()))
