"""`rlkit sweep`: a grid of runs, each one notebook, with one table and one index at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit import terminal
from rlkit.errors import BadInput, RunFailed
from rlkit.run_folder import RUNS

if TYPE_CHECKING:
    from rlkit.sweep import Point, Sweep
    from rlkit.sweep_folder import Ended, SweepFolder


def sweep(
    grid: Annotated[Path, typer.Argument(metavar="GRID.yaml", help="recipe, grid and/or points, seeds, limits.")],
    jobs: Annotated[int | None, typer.Option(min=1, help="Points at once, else by engine.")] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder, else runs/out/<grid's name>.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run those that failed again.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before rented hardware is started.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a notebook for every point of a grid; the same command again goes on where it was stopped."""
    if grid.is_dir():
        raise BadInput(f"{grid}: is a folder; name the grid's file (YAML)")
    with terminal.working(f"reading {grid}"):
        from rlkit.sweep import load_sweep

        planned = load_sweep(grid)
        if jobs is not None:
            planned = planned.limited(jobs)
        from rlkit.sweep_current import code_digest, finished, note_written
        from rlkit.sweep_folder import SweepFolder

        folder = SweepFolder(out or RUNS / grid.stem)
        code = code_digest()
        results = finished(planned, folder, code)
    if results is None or (retry_failed and any(end.status == "failed" for end in results.values())):
        again = shlex.join(["rlkit", "sweep", str(grid), *_place(out, jobs)])
        results = _run(planned, folder, retry_failed, yes, again)
        from rlkit.sweep_run import write_index  # here: it imports for seconds what a sweep without work needs not

        with terminal.working("writing the sweep's index"):
            write_index(folder)
        note_written(planned, folder, results, code)
    else:
        terminal.say(f"{_counted(planned)}: all have ended before", terminal.err)
    _report(planned, folder, results, as_json)


def _run(planned: Sweep, folder: SweepFolder, retry_failed: bool, yes: bool, again: str) -> dict[str, Ended]:
    """Run what has not ended, and write the table; `again` is the command that goes on."""
    rented = sum(point.recipe.engine == "hf" for point in planned.points)
    if rented and not yes and not terminal.agreed(f"at most ${planned.limits.usd:.2f} for {rented} points"):
        raise typer.Exit(1)
    terminal.say(f"{_counted(planned)} in {folder.path}", terminal.err)
    from rlkit.sweep_folder import in_words
    from rlkit.sweep_run import run_sweep

    total = len(planned.points)

    def tell(point: Point, ended: Ended, count: int) -> None:
        terminal.say(f"[{count}/{total}] {in_words(point, ended)}", terminal.err)

    try:
        results = run_sweep(planned, folder.path, tell, retry_failed)
    except (KeyboardInterrupt, SystemExit):
        terminal.say(f"what has ended is kept; go on with: {again}", terminal.err)
        raise
    return results


def _counted(planned: Sweep) -> str:
    count = len(planned.points)
    return f"{count} point{'s' if count != 1 else ''} of {planned.base.name}"


def _place(out: Path | None, jobs: int | None) -> list[str]:
    return [*(["--out", str(out)] if out else []), *(["--jobs", str(jobs)] if jobs else [])]


def _report(planned: Sweep, folder: SweepFolder, results: dict[str, Ended], as_json: bool) -> None:
    from rlkit.sweep_folder import in_words

    counts = {status: sum(end.status == status for end in results.values()) for status in ("done", "failed", "skipped")}
    if as_json:
        import json

        rows = json.loads(folder.table.with_suffix(".json").read_text(encoding="utf-8"))
        terminal.print_json(counts | {"folder": str(folder.path), "index": str(folder.index), "points": rows})
    else:
        for point in planned.points:
            if results[point.key].status != "done":
                terminal.labelled(f"{results[point.key].status}:", "red", in_words(point, results[point.key]))
        terminal.say(", ".join(f"{count} {status}" for status, count in counts.items() if count))
        terminal.say(f"Table: {folder.table}")
        terminal.say(f"Index: {folder.index}")
    if counts["failed"] or counts["skipped"]:
        raise typer.Exit(RunFailed.exit_code)
