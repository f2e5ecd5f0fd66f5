"""`rlkit compare`: the scoreboard of any runs, on the terminal, as JSON, or as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit import terminal
from rlkit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from rlkit.past_run import PastRun

# The notebook that walks through runs is the page, too.
PAGE = Path(__file__).parents[1] / "notebooks" / "03_five_runs.ipynb"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="A run's folder, its name under runs/out, or PROJECT/RUN in trackio."),
    ],
    source: Annotated[str | None, typer.Option(help="A trackio server's URL or a Space; all runs are there.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the page with all figures to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put runs beside each other: the change from one to the next, speed, cost, what bounded each."""
    from rlkit.past_run import open_past_runs
    from rlkit.scoreboard import headline, routing, scoreboard, weight_syncs
    from rlkit.scoreboard_text import published_figures, routing_table, scoreboard_table, sync_table

    if out is not None and out.suffix != ".html":
        raise BadInput(f"--out {out}: name an HTML file (*.html)")
    past = open_past_runs(runs, source=source)
    board, syncs, routed = scoreboard(past), weight_syncs(past), routing(past)
    if out is not None:
        _write_page(runs, past.values(), source, out)
    if as_json:
        records = {"runs": board, "weight_syncs": syncs, "routing": routed}
        shown = {name: json.loads(frame.reset_index().to_json(orient="records")) for name, frame in records.items()}
        terminal.print_json({"headline": headline(board), **shown} | ({"page": str(out)} if out else {}))
        return
    published = published_figures(past)
    terminal.say(headline(board), style="bold")
    print_table(scoreboard_table(board, published))
    terminal.say("Weight syncs", style="bold")
    print_table(sync_table(syncs, published))
    terminal.say("Routing", style="bold")
    print_table(routing_table(routed, published))
    if published:
        terminal.say("In brackets: what was published of the run.")
    if out is not None:
        terminal.say(f"Page: {out}")


def print_table(frame: pd.DataFrame) -> None:
    """A frame of texts as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    for name in frame.columns:
        table.add_column(escape(str(name)), overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(escape(str(cell)) for cell in row))
    terminal.print_table(table)


def _write_page(runs: list[str], past: Iterable[PastRun], source: str | None, out: Path) -> None:
    from rlkit.report import render_notebook

    named = [str(run.folder.path) if run.folder else wanted for wanted, run in zip(runs, past, strict=True)]
    render_notebook(PAGE, {"runs": named, "source": source or ""}, out, title="rlkit compare")
